"""LoRA against an explicit model of two factors, and what it leaves alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from audited import Mlp, batch_of, cross_entropy, maker
from dense_steps import NO_NOISE, NOISE, OPTIMIZERS, SUBJECTS, assert_same_weights, clipped_mean, take, trained, twins
from torch import Tensor, nn
from torch.func import functional_call

import lowkey as lk
from lowkey.factors import Axis
from lowkey.sketch import OneSided
from lowkey.sketch.carriers import Carriers

RANK, SEED = 3, 1
ADAPTED = {
    "MLP": {"body.0.weight": False, "body.3.weight": False, "body.5.weight": False},
    "used twice": {"layer.weight": False, "head.weight": False},
    "convolutions": {"first.weight": False, "second.weight": False},
    "input-first": {"up.weight": True, "down.weight": True},
}
"""The weights with adapters, and whether they are stored input-first. A side of three is not above the rank."""


class Explicit:
    """Factors A and B of each weight as tensors of their own; per-example gradients by autograd, one example after the other."""

    def __init__(self, dense: nn.Module, turned: dict[str, bool], method: Any, starts: dict[str, Tensor]) -> None:
        self.dense, self.turned, self.method = dense, turned, method
        self.frozen = {name: weight.detach().clone() for name, weight in trained(dense).items() if name in turned}
        self.a = {name: starts[name].clone() for name in turned}
        self.b = {name: torch.zeros(self.outputs(name), RANK).double() for name in turned}
        self.rest = {name: weight.detach().clone() for name, weight in trained(dense).items() if name not in turned}

    def outputs(self, name: str) -> int:
        return self.frozen[name].shape[1 if self.turned[name] else 0]

    def tensors(self) -> dict[str, Tensor]:
        factors = {f"{name}/B": value for name, value in self.b.items()}
        if not self.method.freeze_a:
            factors |= {f"{name}/A": value for name, value in self.a.items()}
        return {**factors, **self.rest}

    def weights(self) -> dict[str, Tensor]:
        scale = RANK if self.method.alpha is None else self.method.alpha
        sums = {}
        for name, frozen in self.frozen.items():
            product = scale / RANK * (self.b[name] @ self.a[name])
            sums[name] = frozen + (product.T if self.turned[name] else product).reshape(frozen.shape)
        return {**self.rest, **sums}

    def gradients(self, batch: Any) -> dict[str, Tensor]:
        rows = []
        for b in range(len(batch["y"])):
            one = {key: value[b : b + 1] for key, value in batch.items()}
            for tensor in self.tensors().values():
                tensor.requires_grad_(True)
            logits = functional_call(self.dense, self.weights(), (one["x"],))
            loss = nn.functional.cross_entropy(logits, one["y"])
            rows.append(torch.autograd.grad(loss, list(self.tensors().values())))
            for tensor in self.tensors().values():
                tensor.requires_grad_(False)
        return {name: torch.stack(parts) for name, parts in zip(self.tensors(), zip(*rows, strict=True), strict=True)}


def first_a(private: lk.Private, turned: dict[str, bool], method: Any) -> dict[str, Tensor]:
    """Read the random factors off the first sketches: all that an explicit model needs to start alike."""
    found = {}
    for name, is_turned in turned.items():
        sketch: Any = private.sketches[name]
        if method.freeze_a:
            assert isinstance(sketch, OneSided)
            side = sketch.matrix.T
        else:
            assert isinstance(sketch, Carriers)
            side = sketch.left.T if is_turned else sketch.right
        found[name] = side / method.scale
    return found


METHODS = {"both": {}, "scaled": {"alpha": 2 * RANK}, "frozen A": {"freeze_a": True, "alpha": 1.5}}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("clip_norm", [0.3, math.inf])
@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_lora_is_a_model_of_two_factors(subject: str, kind: str, clip_norm: float, optimizer: str) -> None:
    build, batch = SUBJECTS[subject]
    model, dense = twins(build)
    method, turned = lk.LoRA(rank=RANK, **METHODS[kind]), ADAPTED[subject]
    with lk.privatize(model, OPTIMIZERS[optimizer], method=method, plan=NO_NOISE, clip_norm=clip_norm, seed=SEED) as private:
        explicit = Explicit(dense, turned, method, first_a(private, turned, method))
        tensors = explicit.tensors()
        stepper = OPTIMIZERS[optimizer](list(tensors.values()))
        for _ in range(5):
            take(private, model, batch)
            found = clipped_mean(explicit.gradients(batch), clip_norm, NO_NOISE.expected_batch_size)
            for name, tensor in tensors.items():
                tensor.grad = found[name]
            stepper.step()
    with torch.no_grad():
        for name, value in explicit.weights().items():
            trained(dense)[name].copy_(value)
    assert_same_weights(model, dense)


def privatized(method: Any, build: Callable[[], nn.Module] = Mlp, dtype: torch.dtype = torch.float32, **options: Any) -> lk.Private:
    torch.manual_seed(0)
    given: dict[str, Any] = {"plan": NOISE, "clip_norm": 1.0, "seed": SEED, "noise": lk.SeededNoise(3), **options}
    return lk.privatize(build().to(dtype), functools.partial(torch.optim.AdamW, lr=0.01), method=method, **given)


def test_the_first_factor_has_the_stated_variance() -> None:
    with privatized(lk.LoRA(rank=50), lambda: nn.Linear(400, 60)) as private:
        sketch: Any = private.sketches["weight"]
        assert float(sketch.right.var()) == pytest.approx(1 / (3 * 400), rel=0.05)
        assert not bool(sketch.left.any())


def test_the_update_has_the_rank_of_the_adapter() -> None:
    with privatized(lk.LoRA(rank=RANK), dtype=torch.float64) as private:
        before = private.model.body[0].weight.detach().clone()
        take(private, private.model, batch_of(dtype=torch.float64), 6)
        values = torch.linalg.svdvals(private.model.body[0].weight.detach() - before)
        assert float(values[RANK]) < 1e-12 * float(values[0]) < float(values[RANK - 1])


def test_a_frozen_a_is_an_input_side_sketch_that_never_changes() -> None:
    with privatized(lk.LoRA(rank=RANK, freeze_a=True)) as private:
        first = private.sketches["body.0.weight"]
        assert isinstance(first, OneSided)
        assert first.provenance is lk.Provenance.RANDOM
        assert first.basis(Axis.COLS) is first.matrix
        take(private, private.model, batch_of(), 2)
        assert private.sketches["body.0.weight"] is first


def test_both_factors_make_a_sketch_of_earlier_releases() -> None:
    with privatized(lk.LoRA(rank=RANK)) as private:
        sketch: Any = private.sketches["body.0.weight"]
        assert sketch.zero is Axis.ROWS
        take(private, private.model, batch_of(), 1)
        later: Any = private.sketches["body.0.weight"]
        assert later.zero is None
        assert later.provenance is lk.Provenance.HISTORICAL
        assert not torch.equal(later.right, sketch.right)


def test_a_learning_rate_of_zero_leaves_b_where_it_is() -> None:
    with privatized(lk.LoRA(rank=RANK)) as private:
        private.optimizer.param_groups[0]["lr"] = 0.0
        before = {name: weight.detach().clone() for name, weight in private.model.named_parameters()}
        take(private, private.model, batch_of(), 2)
        sketch: Any = private.sketches["body.0.weight"]
        assert sketch.zero is Axis.ROWS
        assert all(torch.equal(weight, before[name]) for name, weight in private.model.named_parameters())


def identities(private: lk.Private) -> list[str]:
    return [name for name, sketch in private.sketches.items() if sketch.is_identity]


def test_a_narrow_head_and_what_is_no_matrix_are_trained_in_full() -> None:
    with privatized(lk.LoRA(rank=4)) as private:
        assert identities(private) == ["body.0.bias", "body.2.weight", "body.2.bias", "body.3.bias", "body.5.weight", "body.5.bias"]


@pytest.mark.parametrize("place", ["body.3", "body.3.weight"])
def test_a_matrix_is_trained_in_full_where_it_is_asked_for(place: str) -> None:
    with privatized(lk.LoRA(rank=2, whole=(place,))) as private:
        assert "body.3.weight" in identities(private)
        assert "body.0.weight" not in identities(private)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(lk.ConfigError, match=r"whole names 'body.33'"):
        privatized(lk.LoRA(rank=2, whole=("body.33",)))


class Bag(nn.Module):
    """An embedding and a layer on top."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(20, 8), nn.Linear(8, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layer(self.table(tokens).mean(1))


def test_embeddings_are_trained_in_full_unless_they_are_frozen() -> None:
    with privatized(lk.LoRA(rank=2), Bag) as private:
        assert identities(private) == ["table.weight", "layer.bias"]
    with privatized(lk.LoRA(rank=2), Bag, trainable=lambda name, weight: "table" not in name) as private:
        assert identities(private) == ["layer.bias"]


def test_steps_below_the_last_digit_of_a_half_precision_weight_add_up() -> None:
    start = torch.full((8, 8), 1.0)
    model = nn.Linear(8, 8, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.copy_(start)
    optimizer = functools.partial(torch.optim.SGD, lr=1e-3)
    with lk.privatize(model, optimizer, method=lk.LoRA(rank=2), plan=NO_NOISE, clip_norm=1.0, seed=SEED) as private:
        for _ in range(NO_NOISE.num_steps):
            private.backward(model(torch.ones(5, 8).bfloat16()).float().sum(1))
            private.step()
        sketch: Any = private.sketches["weight"]
        expected = start + sketch.left.float() @ sketch.right.float()
    torch.testing.assert_close(model.weight.detach(), expected.bfloat16(), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_has_the_same_factors(dtype: torch.dtype) -> None:
    make = maker(lk.LoRA(rank=RANK), dtype=dtype)
    runs = []
    for resumes in (False, True):
        private, loss = make(lk.SeededNoise(2))
        for step in range(4):
            if resumes and step == 2:
                state, weights = private.state_dict(), private.model.state_dict()
                private.close()
                private, loss = make(lk.SeededNoise(2))
                private.model.load_state_dict(weights)
                private.load_state_dict(state)
            private.backward(loss(batch_of(dtype=dtype)).float())
            private.step()
        runs.append({name: weight.detach().clone() for name, weight in private.model.named_parameters()})
        private.close()
    assert all(torch.equal(value, runs[1][name]) for name, value in runs[0].items())


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"rank": 0}, "rank=0"),
        ({"rank": 4, "alpha": 0.0}, "alpha=0.0"),
        ({"rank": 4, "alpha": math.inf}, "alpha=inf"),
        ({"rank": 4, "alpha": math.nan}, "alpha is nan"),
        ({"rank": 4, "alpha": "8"}, "alpha='8' is a str"),
        ({"rank": 4, "whole": "head"}, "single string"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(lk.ConfigError, match=word):
        lk.LoRA(**options)


def test_a_model_of_adapters_alone_is_clipped_by_one_norm() -> None:
    with privatized(lk.LoRA(rank=RANK), plan=NO_NOISE) as private:
        sums: list[Any] = []
        private.on_release(lambda released: sums.append(sum(float(block.square().sum()) for block in released.blocks.values()) ** 0.5))
        take(private, private.model, batch_of(), 1)
        private.backward(cross_entropy(private.model, {key: value[:1] for key, value in batch_of().items()}) * 1e4)
        private.step()
    assert sums[1] == pytest.approx(1.0 / NO_NOISE.expected_batch_size, rel=1e-5)
