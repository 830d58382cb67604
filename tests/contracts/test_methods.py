"""What every method promises: one row in the table buys every test here."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from allocations import EXAMPLES, LINEAR, watched
from allocations import losses as losses_of_linear
from audited import PLAN, Mlp, batch_of, cross_entropy, maker
from torch import Tensor, nn

import lowkey as lk
from lowkey.audit import Check, mechanism


@dataclass(frozen=True)
class Row:
    """A method, how many coordinates its audit looks at, and how it is made for a model if it needs examples that the model takes."""

    method: Any
    num_coordinates: int = 20_000
    with_public: Callable[[lk.Public], Any] | None = None

    def on(self, public: lk.Public) -> Any:
        return self.method if self.with_public is None else self.with_public(public)


def needs_public(make: Callable[[lk.Public], Any]) -> Row:
    return Row(make(lk.Public(batch_of(8), cross_entropy)), with_public=make)


METHODS = {
    "DPSGD": Row(lk.DPSGD()),
    "Grape input": Row(lk.Grape(rank=4, refresh_every=2)),
    "Grape output": Row(lk.Grape(rank=4, refresh_every=1, side="output", distribution="rademacher", on_refresh="rotate")),
    "Grape smaller": Row(lk.Grape(rank=4, refresh_every=3, side="smaller", distribution="stiefel", on_refresh="reset")),
    "Grape embeddings": Row(lk.Grape(rank=4, refresh_every=2, sketch_embeddings=True)),
    "NaiveGaLore": Row(lk.NaiveGaLore(rank=3, refresh_every=2)),
    "RGP": Row(lk.RGP(rank=3, warmup_steps=2)),
    "RGP weight isometric": Row(lk.RGP(rank=3, basis="weight", isometric=True, power_iterations=2)),
    "RGP random left": Row(lk.RGP(rank=3, basis="random", carriers="left")),
    "PowerSGD": Row(lk.PowerSGD(rank=3)),
    "LoRA": Row(lk.LoRA(rank=3)),
    "LoRA frozen A": Row(lk.LoRA(rank=3, freeze_a=True, alpha=6.0)),
    "PDPSGD": needs_public(lambda public: lk.PDPSGD(public=public, rank=2, refresh_every=2)),
    "PDPSGD sketch first": needs_public(lambda public: lk.PDPSGD(public=public, rank=3, refresh_every=3, start_step=2, sketch_first=True)),
    "RPDPSGD": Row(lk.RPDPSGD(rank=20, refresh_every=2)),
    "RPDPSGD sketch first": Row(lk.RPDPSGD(rank=20, refresh_every=3, sketch_first=True)),
    "GEP": needs_public(lambda public: lk.GEP(public=public, rank=3, refresh_every=2)),
    "Denoise gradient": Row(lk.Denoise()),
    "Denoise momentum": Row(lk.Denoise(target="momentum", decay=0.5)),
    "LinearProbe": Row(lk.LinearProbe()),
    "DPZero": Row(lk.DPZero(scale=1e-3)),
    "NonPrivate": Row(lk.nonprivate.NonPrivate()),
    "NonPrivate Grape": Row(lk.nonprivate.NonPrivate(method=lk.Grape(rank=4, refresh_every=2))),
    "NonPrivate RGP": Row(lk.nonprivate.NonPrivate(method=lk.RGP(rank=3, warmup_steps=2))),
    "NonPrivate LoRA": Row(lk.nonprivate.NonPrivate(method=lk.LoRA(rank=3))),
    "MeZO": Row(lk.nonprivate.NonPrivate(method=lk.DPZero(scale=1e-3))),
    "GaLore": Row(lk.nonprivate.GaLore(rank=3, refresh_every=2)),
}
every_method = pytest.mark.parametrize("name", METHODS)

OPTIMIZERS = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adam": functools.partial(torch.optim.Adam, lr=0.01, weight_decay=0.1),
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "AdamW foreach": functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, foreach=True),
    "AdamW fused": functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, fused=True),
}


# -- models ------------------------------------------------------------------------------------------------------------


class ResNet(nn.Module):
    """Convolutions, GroupNorm and a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
        self.head = nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.stem(inputs)))
        return self.head((hidden + self.block(hidden)).mean((2, 3)))


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=12,
        num_labels=4,
    )
    return transformers.BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=12))


def classify_text(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(input_ids=batch["ids"]).logits, batch["y"], reduction="none")


def predict_text(model: nn.Module, batch: Any) -> Tensor:
    logits = model(input_ids=batch["ids"]).logits[:, :-1]
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), batch["ids"][:, 1:].flatten(), reduction="none")
    return losses.view(len(logits), -1).mean(1)


TEXT = {"ids": torch.randint(0, 40, (3, 7), generator=torch.Generator().manual_seed(0)), "y": torch.tensor([0, 1, 2])}
IMAGES = {"x": torch.randn(3, 3, 6, 6, generator=torch.Generator().manual_seed(0)), "y": torch.tensor([0, 1, 2])}
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], Any]] = {
    "MLP": (Mlp, cross_entropy, batch_of()),
    "ResNet": (ResNet, cross_entropy, IMAGES),
    "BERT": (bert, classify_text, TEXT),
    "GPT-2": (gpt2, predict_text, TEXT),
}


def weights_of(private: lk.Private) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in private.model.named_parameters() if parameter.requires_grad}


def take(private: lk.Private, loss: Callable[[Any], Tensor], steps: int, batch: Any = None) -> None:
    for _ in range(steps):
        private.backward(lambda: loss(batch_of() if batch is None else batch))  # a function, for methods that take each loss twice
        private.step()


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


# -- promises ----------------------------------------------------------------------------------------------------------


@every_method
def test_the_audit_finds_nothing_or_that_nothing_is_promised(name: str) -> None:
    row = METHODS[name]
    found = {finding.check for finding in mechanism(maker(row.method), batch_of(), num_coordinates=row.num_coordinates).findings}
    assert found == (set() if row.method.has_guarantee else {Check.GUARANTEE})


@every_method
@pytest.mark.parametrize("kind", MODELS)
def test_a_method_trains_a_model(name: str, kind: str) -> None:
    build, loss, batch = MODELS[kind]
    method = METHODS[name].on(lk.Public(batch, loss))
    private, losses = maker(method, model=build, loss=loss)(lk.SystemNoise())
    with private:
        before = weights_of(private)
        take(private, losses, 2, batch)
        after = weights_of(private)
        assert all(bool(torch.isfinite(value).all()) for value in after.values())
        assert [name for name, value in after.items() if torch.equal(value, before[name])] == []
        assert private.history == ((PLAN.sampling_rate, 1.0 if METHODS[name].method.has_guarantee else 0.0, 2),)


@every_method
@pytest.mark.parametrize("saved_after", [1, 2, 3])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(name: str, saved_after: int) -> None:
    make = maker(METHODS[name].method)
    private, loss = make(lk.SeededNoise(4))
    with private:
        take(private, loss, saved_after)
        # As with torch's own optimizers, a state holds the tensors that training goes on to change.
        checkpoint, model = copy.deepcopy((private.state_dict(), private.model.state_dict()))
        take(private, loss, 4 - saved_after)
        expected = weights_of(private)
    again, loss = make(lk.SeededNoise(4))
    with again:
        again.model.load_state_dict(model)
        again.load_state_dict(checkpoint)
        take(again, loss, 4 - saved_after)
        assert same(weights_of(again), expected)
        assert again.history[-1][2] == 4


@every_method
@pytest.mark.parametrize("kind", ["MLP", "ResNet"])
def test_a_batch_without_examples_is_a_release_of_noise_alone(name: str, kind: str) -> None:
    build, loss, batch = MODELS[kind]
    method = METHODS[name].on(lk.Public(batch, loss))
    nobody = {key: value[:0] for key, value in batch.items()}
    ends = []
    for draws in ([], [nobody], [nobody, nobody]):
        private, losses = maker(method, model=build, loss=loss)(lk.SeededNoise(4))
        with private:
            for drawn in draws:
                private.backward(functools.partial(losses, drawn))
            assert private.step().num_steps_left == PLAN.num_steps - 1
            take(private, losses, 1, batch)
            ends.append(weights_of(private))
    assert same(ends[0], ends[1])
    assert same(ends[0], ends[2])


@every_method
def test_a_checkpoint_survives_a_file_that_may_hold_tensors_only(name: str, tmp_path: Any) -> None:
    private, loss = maker(METHODS[name].method)(lk.SeededNoise(4))
    with private:
        take(private, loss, 1)
        torch.save(private.state_dict(), tmp_path / "state.pt")
        loaded = torch.load(tmp_path / "state.pt", weights_only=True)
        assert loaded["step"] == 1


@every_method
def test_a_scheduler_attaches_to_the_optimizer(name: str) -> None:
    private, loss = maker(METHODS[name].method)(lk.SeededNoise(4))
    with private:
        scheduler = torch.optim.lr_scheduler.LambdaLR(private.optimizer, lambda step: 0.0 if step else 1.0)
        take(private, loss, 1)
        scheduler.step()
        before = weights_of(private)
        take(private, loss, 1)
        assert same(weights_of(private), before)


@every_method
@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW"])
def test_every_optimizer_steps_every_weight_that_is_trained(name: str, optimizer: str) -> None:
    private, loss = maker(METHODS[name].method, optimizer=OPTIMIZERS[optimizer])(lk.SeededNoise(4))
    with private:
        before = weights_of(private)
        take(private, loss, 3)
        after = weights_of(private)
        assert all(bool(torch.isfinite(value).all()) for value in after.values())
        assert [name for name, value in after.items() if torch.equal(value, before[name])] == []


@every_method
def test_weight_decay_acts_on_the_real_weights(name: str) -> None:
    quiet = dataclasses.replace(PLAN, noise_multiplier=0.0)
    private, _ = maker(METHODS[name].method, optimizer=OPTIMIZERS["AdamW"], plan=quiet)(lk.SeededNoise(4))
    with private:
        # Factors of an adapter are parameters of their own and decay as such; while B is zero, nothing of it shows in the weight.
        adapted = {name for name, subspace in private._strategy.space.subspaces().items() if not subspace.is_centred}
        before = weights_of(private)
        private.step()  # an empty batch without noise: a gradient of zero
        for parameter, value in weights_of(private).items():
            expected = before[parameter] * (1.0 if parameter in adapted else 1.0 - 0.01 * 0.1)
            torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", [name for name, row in METHODS.items() if row.method.has_guarantee])
def test_without_a_guarantee_a_method_is_itself_without_limit_and_noise(name: str) -> None:
    method, quiet = METHODS[name].method, dataclasses.replace(PLAN, noise_multiplier=0.0)
    runs = []
    for given, plan, clip_norm in ((lk.nonprivate.NonPrivate(method=method), PLAN, 0.01), (method, quiet, float("inf"))):
        torch.manual_seed(0)
        model = Mlp()
        with lk.privatize(model, OPTIMIZERS["Adam"], method=given, plan=plan, clip_norm=clip_norm, seed=0) as private:
            take(private, functools.partial(cross_entropy, model), 3)
            assert private.epsilon == float("inf")
            runs.append(weights_of(private))
    assert same(*runs)


@every_method
@pytest.mark.parametrize("check", list(lk.CheckIsolation))
def test_execution_changes_neither_release_nor_charge(name: str, check: lk.CheckIsolation) -> None:
    runs = []
    for execution in (lk.Execution(), lk.Execution(check_isolation=check)):
        private, loss = maker(METHODS[name].method, execution=execution)(lk.SeededNoise(4))
        with private:
            take(private, loss, 3)
            runs.append((weights_of(private), private.history))
    assert same(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]


@every_method
def test_groups_give_a_parameter_options_of_its_own(name: str) -> None:
    still = "body.5.weight"
    make = maker(METHODS[name].method, groups=lambda name: {"lr": 0.0} if name == still else {})
    private, loss = make(lk.SeededNoise(4))
    with private:
        before = weights_of(private)
        take(private, loss, 2)
        assert [name for name, value in weights_of(private).items() if torch.equal(value, before[name])] == [still]


@every_method
def test_closing_gives_the_model_back(name: str) -> None:
    private, loss = maker(METHODS[name].method)(lk.SeededNoise(4))
    model = private.model
    names = list(model.state_dict())
    take(private, loss, 1)
    private.close()
    private.close()
    model(batch_of()["x"]).sum().backward()
    assert list(model.state_dict()) == names
    assert all((parameter.grad is None) == ("frozen" in name) for name, parameter in model.named_parameters())


@every_method
def test_no_method_forms_each_examples_gradient_in_full(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where gradients must be multiplied out, they are a few rows at a time: as many as this many numbers, which here is one row.
    monkeypatch.setattr("lowkey.sketch.shared._CHUNK_ELEMENTS", 1)
    seen = watched(METHODS[name].on(lk.Public(LINEAR.inputs, losses_of_linear)), LINEAR, with_step=False)
    assert seen.at_least(EXAMPLES * LINEAR.numel) == []


# -- the identity sketch is torch's own optimizer ------------------------------------------------------------------------

NO_NOISE = lk.Plan(noise_multiplier=0.0, delta=1e-3, num_examples=100, expected_batch_size=5, num_steps=10)


@pytest.mark.parametrize("method", [lk.DPSGD(), lk.nonprivate.NonPrivate()], ids=repr)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_without_noise_and_limit_ten_steps_are_torchs_own(method: Any, optimizer: str) -> None:
    torch.manual_seed(0)
    model = Mlp().double()
    ordinary = Mlp().double()
    ordinary.load_state_dict(model.state_dict())
    batch = batch_of(dtype=torch.float64)
    with lk.privatize(model, OPTIMIZERS[optimizer], method=method, plan=NO_NOISE, clip_norm=float("inf")) as private:
        take(private, functools.partial(cross_entropy, model), 10, batch)
    stepper = OPTIMIZERS[optimizer]([parameter for parameter in ordinary.parameters() if parameter.requires_grad])
    for _ in range(10):
        stepper.zero_grad()
        cross_entropy(ordinary, batch).mean().backward()
        stepper.step()
    for mine, theirs in zip(model.parameters(), ordinary.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)


# -- Grape from its formula, dense, in float64 ---------------------------------------------------------------------------


def dense_grape(model: nn.Module, bases: dict[str, tuple[bool, Tensor]], batch: Any, bound: float, size: int) -> dict[str, Tensor]:
    """Sketch each example's full gradient, clip the joint vector, sum and divide: equation (R) without noise."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    total = {name: torch.zeros(()) for name in trained}
    for row in range(len(batch["y"])):
        one = {key: value[row : row + 1] for key, value in batch.items()}
        gradients = torch.autograd.grad(cross_entropy(model, one).sum(), list(trained.values()))
        vector = {}
        for name, gradient in zip(trained, gradients, strict=True):
            reduces_input, basis = bases.get(name, (True, None))
            vector[name] = gradient if basis is None else gradient @ basis if reduces_input else basis.T @ gradient
        norm = sum(part.square().sum() for part in vector.values()).sqrt()
        total = {name: total[name] + part * min(1.0, bound / float(norm)) for name, part in vector.items()}
    return {name: part / size for name, part in total.items()}


GRAPE_OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.2}),
}


@pytest.mark.parametrize("side", ["input", "output"])
@pytest.mark.parametrize("optimizer", GRAPE_OPTIMIZERS)
def test_grape_is_its_formula(side: str, optimizer: str) -> None:
    kind, options = GRAPE_OPTIMIZERS[optimizer]
    decay = options.get("weight_decay", 0.0)
    torch.manual_seed(0)
    model, dense = Mlp().double(), Mlp().double()
    dense.load_state_dict(model.state_dict())
    batch = batch_of(dtype=torch.float64)
    method = lk.Grape(rank=4, refresh_every=3, side=side)
    trained = {name: parameter for name, parameter in dense.named_parameters() if parameter.requires_grad}
    proxies: dict[str, Tensor] = {}
    stepper: Any = None
    with lk.privatize(model, functools.partial(kind, **options), method=method, plan=NO_NOISE, clip_norm=0.3, seed=1) as private:
        for _ in range(7):
            bases = {name: (side == "input", sketch.matrix) for name, sketch in private.sketches.items() if not sketch.is_identity}
            take(private, functools.partial(cross_entropy, model), 1, batch)
            gradients = dense_grape(dense, bases, batch, 0.3, NO_NOISE.expected_batch_size)
            if stepper is None:
                # One optimizer over all coordinates; the sketched ones start each step at zero, and their step is decoded.
                proxies = {name: nn.Parameter(torch.zeros_like(gradients[name])) for name in bases}
                stepper = kind(
                    [
                        {"params": [proxies.get(name, weight)], "weight_decay": 0.0 if name in bases else decay}
                        for name, weight in trained.items()
                    ],
                    **{**options, "weight_decay": 0.0},
                )
            for name, weight in trained.items():
                (proxies.get(name, weight)).grad = gradients[name]
            stepper.step()
            with torch.no_grad():
                for name, (reduces_input, basis) in bases.items():
                    trained[name].mul_(1 - options["lr"] * decay).add_(proxies[name] @ basis.T if reduces_input else basis @ proxies[name])
                    proxies[name].zero_()
    for (name, mine), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11, msg=name)
