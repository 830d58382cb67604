"""RGP against its formulas, dense and in float64, and what its carriers follow."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
from audited import Mlp, batch_of, cross_entropy, maker
from dense_steps import (
    NO_NOISE,
    NOISE,
    OPTIMIZERS,
    SUBJECTS,
    Gradients,
    assert_same_weights,
    clipped_mean,
    dense_gradients,
    take,
    trained,
    twins,
)
from torch import Tensor, nn

import lowkey as lk
from lowkey.methods.rgp import CarrierBasis, TrainedCarriers
from lowkey.sketch import OneSided
from lowkey.sketch.carriers import Carriers
from lowkey.sketch.power_method import draw_carriers

RANK, WARM_UP, SEED = 2, 2, 1


def gram_schmidt(columns: Tensor) -> Tensor:
    done: list[Tensor] = []
    for column in columns.T:
        for other in done:
            column = column - other * (other @ column)
        done.append(column / column.norm())
    return torch.stack(done, dim=1)


class DenseRGP:
    """Algorithms 1 and 2 on dense matrices; shares with the library only the random numbers that the power method starts from."""

    def __init__(self, model: nn.Module, names: list[str], method: Any) -> None:
        self.method, self.names = method, names
        self.weights = trained(model)
        self.first = {name: self.weights[name].detach().clone() for name in names}
        self.right: dict[str, Tensor] = {}
        self.step = 0

    def carriers(self, name: str) -> tuple[Tensor, Tensor]:
        if self.method.basis is CarrierBasis.RANDOM:
            return draw_carriers(*self.weights[name].flatten(1).shape, self.method.rank, (SEED, "carriers", name, self.step))
        followed = self.weights[name].detach().clone()
        if self.method.basis is CarrierBasis.HISTORY and self.step > self.method.warmup_steps:
            followed -= self.first[name]
        followed = followed.flatten(1)
        right = self.right.get(name) if self.method.warm_start else None
        if right is None:
            right = draw_carriers(*followed.shape, self.method.rank, (SEED, "carriers", name, self.step))[1]
        left = torch.empty(0)
        for _ in range(self.method.power_iterations):
            left = gram_schmidt(followed @ right.T)
            right = left.T @ followed
        self.right[name] = gram_schmidt(right.T).T
        return left, self.right[name]

    def gradients(self, dense: Gradients, clip_norm: float, size: int) -> Gradients:
        """Return the gradient of Eq. 3 for every parameter."""
        self.step += 1
        vectors, bases = dict(dense), {name: self.carriers(name) for name in self.names}
        for name, (left, right) in bases.items():
            gradient = vectors.pop(name).flatten(2)
            vectors[f"{name}.X"], vectors[f"{name}.Y"] = gradient @ right.T, left.T @ gradient
            if self.method.isometric:
                vectors[f"{name}.Y"] = left.T @ gradient @ (torch.eye(right.shape[1]).double() - right.T @ right)
            self._leave_one(name, vectors)
        means = clipped_mean(vectors, clip_norm, size)
        return {name: self._decoded(name, bases, means) for name in dense}

    def _leave_one(self, name: str, vectors: Gradients) -> None:
        # In the paper's orientation the left carrier's gradient is narrow along the input; a weight stored input-first is its transpose.
        input_first = type_of_layer(name) == "input-first"
        dropped = {TrainedCarriers.LEFT: "X" if input_first else "Y", TrainedCarriers.RIGHT: "Y" if input_first else "X"}
        if self.method.carriers in dropped:
            del vectors[f"{name}.{dropped[self.method.carriers]}"]

    def _decoded(self, name: str, bases: dict[str, tuple[Tensor, Tensor]], means: Gradients) -> Tensor:
        if name not in bases:
            return means[name]
        left, right = bases[name]
        x, y = means.get(f"{name}.X"), means.get(f"{name}.Y")
        found = torch.zeros(left.shape[0], right.shape[1]).double()
        if x is not None:
            found += x @ right
        if y is not None:
            found += left @ y
        if x is not None and y is not None and not self.method.isometric:
            found -= left @ left.T @ x @ right
        return found.view_as(self.weights[name])


def type_of_layer(name: str) -> str:
    return "input-first" if name.startswith(("up.", "down.")) else "output-first"


SKETCHED = {
    "MLP": ["body.0.weight", "body.3.weight", "body.5.weight"],
    "used twice": ["layer.weight", "head.weight"],
    "convolutions": ["first.weight", "second.weight", "head.weight"],
    "input-first": ["up.weight", "down.weight", "head.weight"],
}
VARIANTS = {
    "history": {},
    "weight": {"basis": "weight", "power_iterations": 2},
    "isometric": {"isometric": True},
    "left": {"carriers": "left"},
    "right": {"carriers": "right"},
    "warm": {"warm_start": True},
    "random": {"basis": "random"},
    "random left": {"basis": "random", "carriers": "left"},
}


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("clip_norm", [0.3, math.inf])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_rgp_is_its_formula(subject: str, variant: str, clip_norm: float, optimizer: str) -> None:
    build, batch = SUBJECTS[subject]
    model, dense = twins(build)
    method = lk.RGP(rank=RANK, warmup_steps=WARM_UP, **VARIANTS[variant])
    formula = DenseRGP(dense, SKETCHED[subject], method)
    stepper = OPTIMIZERS[optimizer](list(trained(dense).values()))
    with lk.privatize(model, OPTIMIZERS[optimizer], method=method, plan=NO_NOISE, clip_norm=clip_norm, seed=SEED) as private:
        for _ in range(WARM_UP + 3):
            take(private, model, batch)
            found = formula.gradients(dense_gradients(dense, batch), clip_norm, NO_NOISE.expected_batch_size)
            for name, weight in trained(dense).items():
                weight.grad = found[name]
            stepper.step()
    assert_same_weights(model, dense)


def sketches_of(method: Any, steps: int, model: nn.Module | None = None, noise: int = 1) -> list[dict[str, Any]]:
    model = model or Mlp().double()
    seen = []
    with lk.privatize(
        model, OPTIMIZERS["SGD"], method=method, plan=NOISE, clip_norm=1.0, seed=SEED, noise=lk.SeededNoise(noise)
    ) as private:
        for _ in range(steps):
            seen.append(dict(private.sketches))
            take(private, model, batch_of(dtype=torch.float64))
    return seen


@pytest.mark.parametrize(("basis", "provenance"), [("history", "HISTORICAL"), ("weight", "HISTORICAL"), ("random", "RANDOM")])
def test_carriers_say_where_they_come_from_and_are_orthonormal(basis: str, provenance: str) -> None:
    for sketches in sketches_of(lk.RGP(rank=3, basis=basis, warmup_steps=1), 3):
        sketch = sketches["body.0.weight"]
        assert isinstance(sketch, Carriers)
        assert sketch.provenance is lk.Provenance[provenance]
        torch.testing.assert_close(sketch.left.T @ sketch.left, torch.eye(3).double())
        torch.testing.assert_close(sketch.right @ sketch.right.T, torch.eye(3).double())


def test_random_carriers_are_new_in_every_step_and_the_same_for_a_seed() -> None:
    first, again = (sketches_of(lk.RGP(rank=3, basis="random"), 2, noise=noise) for noise in (1, 2))
    assert not torch.equal(first[0]["body.0.weight"].left, first[1]["body.0.weight"].left)
    assert torch.equal(first[1]["body.0.weight"].left, again[1]["body.0.weight"].left)


def cosine(first: Tensor, second: Tensor) -> float:
    """How much of the span of `first` lies in that of `second`, from 0 to 1."""
    return float((first.T @ second).square().sum()) / first.shape[1]


def test_history_is_followed_after_the_warm_up_and_the_weight_before() -> None:
    torch.manual_seed(3)
    model = Mlp().double()
    first = model.body[0].weight.detach().clone()
    method = lk.RGP(rank=3, warmup_steps=2, power_iterations=20)
    with lk.privatize(model, OPTIMIZERS["SGD"], method=method, plan=NOISE, clip_norm=1.0, noise=lk.SeededNoise(3), seed=SEED) as private:
        take(private, model, batch_of(dtype=torch.float64), 2)
        history = torch.linalg.svd(model.body[0].weight.detach() - first)[0][:, :3]
        whole = torch.linalg.svd(model.body[0].weight.detach())[0][:, :3]
        found = private.sketches["body.0.weight"]
        assert isinstance(found, Carriers)
        assert cosine(history, found.left) > 0.95 > cosine(whole, found.left)


def test_what_is_narrow_or_no_matrix_is_released_whole() -> None:
    (sketches,) = sketches_of(lk.RGP(rank=4), 1)
    assert [name for name, sketch in sketches.items() if not sketch.is_identity] == ["body.0.weight", "body.3.weight"]


@pytest.mark.parametrize(("carriers", "axis"), [("left", lk.factors.Axis.COLS), ("right", lk.factors.Axis.ROWS)])
def test_one_carrier_alone_is_a_one_sided_sketch(carriers: str, axis: Any) -> None:
    (sketches,) = sketches_of(lk.RGP(rank=4, carriers=carriers), 1)
    sketch = sketches["body.0.weight"]
    assert isinstance(sketch, OneSided)
    assert sketch.axis is axis
    # The left carrier's gradient lets a layer keep its input already reduced.
    assert (sketch.basis(lk.factors.Axis.COLS) is None) == (carriers == "right")


def test_a_resumed_run_remembers_the_first_weights_and_the_carriers() -> None:
    make = maker(lk.RGP(rank=3, warmup_steps=1))
    private, loss = make(lk.SeededNoise(2))
    with private:
        for _ in range(3):
            private.backward(loss(batch_of()))
            private.step()
        state, weights = copy.deepcopy((private.state_dict(), private.model.state_dict()))
        expected = private.sketches["body.0.weight"]
    again, _ = make(lk.SeededNoise(2))
    with again:
        again.model.load_state_dict(weights)
        again.load_state_dict(state)
        found = again.sketches["body.0.weight"]
        assert torch.equal(found.left, expected.left)
        assert torch.equal(found.right, expected.right)


def test_half_precision_weights_have_carriers_in_single_precision() -> None:
    torch.manual_seed(0)
    model = Mlp().bfloat16()
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    with lk.privatize(model, optimizer, method=lk.RGP(rank=3, warmup_steps=1), plan=NOISE, clip_norm=1.0, seed=SEED) as private:
        for _ in range(3):
            private.backward(cross_entropy(model, batch_of(dtype=torch.bfloat16)).float())
            private.step()
        assert private.sketches["body.0.weight"].left.dtype == torch.float32
        assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"rank": 0}, "rank=0"),
        ({"rank": True}, "rank=True"),
        ({"rank": 4, "power_iterations": 0}, "power_iterations=0"),
        ({"rank": 4, "warmup_steps": 0}, "warmup_steps=0"),
        ({"rank": 4, "carriers": "none"}, "carriers='none'"),
        ({"rank": 4, "basis": "current"}, "basis='current'"),
        ({"rank": 4, "carriers": "left", "isometric": True}, "nothing to take away"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(lk.ConfigError, match=word):
        lk.RGP(**options)


def test_a_rank_that_leaves_no_matrix_is_refused() -> None:
    with pytest.raises(lk.ConfigError, match="rank=40 leaves no matrix"):
        sketches_of(lk.RGP(rank=40), 1)
