"""PDP-SGD and its random baseline against their formulas, dense and in float64."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from audited import batch_of, cross_entropy, maker
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
from lowkey.boundary import Released
from lowkey.refine.project import project, project_randomly
from lowkey.sketch.shared import draw_directions

RANK, EVERY, START = 3, 2, 2
BOUNDS = [math.inf, 0.2]


def public_like(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Other examples of the batch's kind."""
    generator = torch.Generator().manual_seed(5)
    shape = (7, *batch["x"].shape[1:])
    return {"x": torch.randn(*shape, generator=generator, dtype=torch.float64), "y": torch.randint(0, 3, (7,), generator=generator)}


def row_of(gradients: Mapping[str, Tensor]) -> Tensor:
    """Lay all parameters side by side, `(B, coordinates)`."""
    return torch.cat([value.flatten(1) for value in gradients.values()], 1)


def parts_of(row: Tensor, like: Mapping[str, Tensor]) -> Gradients:
    pieces = row.split([value.numel() for value in like.values()])
    return {name: piece.view(value.shape) for (name, value), piece in zip(like.items(), pieces, strict=True)}


def dense_directions(gradients: Tensor, rank: int) -> Tensor:
    """The top eigenvectors of the second moment itself, over all coordinates."""
    return torch.linalg.eigh(gradients.T @ gradients / len(gradients))[1][:, -rank:].T


class DensePDPSGD:
    """Algorithm 1 on dense vectors, and its form that sketches first."""

    def __init__(self, model: nn.Module, public: Any, optimizer: Any, *, bound: float, sketch_first: bool) -> None:
        self.model, self.public, self.bound, self.sketch_first = model, public, bound, sketch_first
        self.stepper = optimizer(list(trained(model).values()))
        self.directions = torch.zeros(0)

    def step(self, number: int, batch: Any) -> None:
        weights = trained(self.model)
        if number >= START and (number - START) % EVERY == 0:
            self.directions = self.renewed((number - START) // EVERY)
        rows = row_of(dense_gradients(self.model, batch))
        if number >= START and self.sketch_first:
            rows = rows @ self.directions.T
        mean = clipped_mean({"row": rows}, self.bound, NO_NOISE.expected_batch_size)["row"]
        if number >= START:
            mean = self.directions.T @ (mean if self.sketch_first else self.directions @ mean)
        for name, gradient in parts_of(mean, weights).items():
            weights[name].grad = gradient
        self.stepper.step()

    def renewed(self, window: int) -> Tensor:
        return dense_directions(row_of(dense_gradients(self.model, self.public)), RANK)


class DenseRPDPSGD(DensePDPSGD):
    """The same along Gaussian directions; shares with the library only the random numbers."""

    def renewed(self, window: int) -> Tensor:
        shapes = {name: tuple(weight.shape) for name, weight in trained(self.model).items()}
        drawn = [draw_directions(shape, range(RANK), RANK, (window, "directions", 1, name)) for name, shape in shapes.items()]
        return torch.cat([part.flatten(1) for part in drawn], 1)


@pytest.mark.parametrize("sketch_first", [False, True])
@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_of_the_random_baseline_is_its_formula(optimizer: str, bound: float, sketch_first: bool) -> None:
    build, batch = SUBJECTS["convolutions"]
    model, dense = twins(build)
    method = lk.RPDPSGD(rank=RANK, refresh_every=EVERY, start_step=START, sketch_first=sketch_first)
    expected = DenseRPDPSGD(dense, None, OPTIMIZERS[optimizer], bound=bound, sketch_first=sketch_first)
    with lk.privatize(model, OPTIMIZERS[optimizer], method=method, plan=NO_NOISE, clip_norm=bound, seed=1) as private:
        for number in range(1, 6):
            take(private, model, batch)
            expected.step(number, batch)
    assert_same_weights(model, dense, 1e-7)


@pytest.mark.parametrize("sketch_first", [False, True])
@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("subject", ["convolutions", "input-first"])
def test_a_step_is_its_formula(subject: str, optimizer: str, bound: float, sketch_first: bool) -> None:
    build, batch = SUBJECTS[subject]
    model, dense = twins(build)
    examples = public_like(batch)
    method = lk.PDPSGD(
        public=lk.Public(examples, cross_entropy), rank=RANK, refresh_every=EVERY, start_step=START, sketch_first=sketch_first
    )
    expected = DensePDPSGD(dense, examples, OPTIMIZERS[optimizer], bound=bound, sketch_first=sketch_first)
    with lk.privatize(model, OPTIMIZERS[optimizer], method=method, plan=NO_NOISE, clip_norm=bound) as private:
        for number in range(1, 6):
            take(private, model, batch)
            expected.step(number, batch)
    assert_same_weights(model, dense, 1e-7)


def basis_of(private: lk.Private) -> Tensor:
    directions = private.state_dict()["strategy"]["sketching"]["directions"]
    return torch.cat([part.flatten(1) for part in directions.values()], 1)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_the_refreshed_basis_is_that_of_the_dense_second_moment_at_the_weights_of_the_step(subject: str) -> None:
    build, batch = SUBJECTS[subject]
    model, _ = twins(build)
    examples = public_like(batch)
    method = lk.PDPSGD(public=lk.Public(examples, cross_entropy), rank=RANK, sketch_first=True)
    with lk.privatize(model, OPTIMIZERS["SGD"], method=method, plan=NO_NOISE, clip_norm=1.0) as private:
        take(private, model, batch, 2)
        found = basis_of(private)
    expected = dense_directions(row_of(dense_gradients(model, examples)), RANK)
    assert float((found.T @ found - expected.T @ expected).abs().max()) < 1e-10


def test_until_it_starts_it_is_dpsgd() -> None:
    runs = []
    for method in (lk.PDPSGD(public=lk.Public(batch_of(8), cross_entropy), rank=3, start_step=4), lk.DPSGD()):
        private, loss = maker(method)(lk.SeededNoise(2))
        with private:
            for _ in range(3):
                private.backward(loss(batch_of()))
                private.step()
            runs.append([weight.clone() for weight in trained(private.model).values()])
            private.step()
            runs.append([weight.clone() for weight in trained(private.model).values()])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(runs[0], runs[2], strict=True))
    assert not any(torch.equal(mine, theirs) for mine, theirs in zip(runs[1], runs[3], strict=True))


@pytest.mark.parametrize("sketch_first", [False, True])
def test_a_batch_whose_gradients_the_public_ones_span_loses_nothing(sketch_first: bool) -> None:
    build, batch = SUBJECTS["convolutions"]
    model, dense = twins(build)
    projected = lk.PDPSGD(public=lk.Public(batch, cross_entropy), rank=5, sketch_first=sketch_first)
    for each, method in ((model, projected), (dense, lk.DPSGD())):
        with lk.privatize(each, OPTIMIZERS["SGD"], method=method, plan=NO_NOISE, clip_norm=0.2) as private:
            take(private, each, batch, 3)
    assert_same_weights(model, dense, 1e-8)


def test_the_optimizer_stays_in_the_weights_and_one_basis_is_kept_as_long_as_it_stands() -> None:
    method = lk.PDPSGD(public=lk.Public(batch_of(8), cross_entropy), rank=3, refresh_every=3)
    private, _ = maker(method)(lk.SeededNoise(2))
    with private:
        bases = []
        for _ in range(4):
            private.step()
            bases.append(basis_of(private))
        stepped = {id(tensor) for group in private.optimizer.param_groups for tensor in group["params"]}
        assert stepped == {id(parameter) for parameter in trained(private.model).values()}
    assert [torch.equal(first, second) for first, second in itertools.pairwise(bases)] == [True, True, False]


# -- what is refused ---------------------------------------------------------------------------------------------------

PUBLIC = lk.Public(batch_of(8), cross_entropy)


@pytest.mark.parametrize("method", [lk.PDPSGD, lk.GEP])
def test_more_directions_than_public_examples_are_refused(method: Any) -> None:
    with pytest.raises(lk.ConfigError, match="rank=9 is above the 8 public examples"):
        method(public=PUBLIC, rank=9)


@pytest.mark.parametrize("method", [lk.PDPSGD, lk.GEP])
def test_examples_that_are_not_declared_public_are_refused(method: Any) -> None:
    with pytest.raises(lk.ConfigError, match=r"public is a dict.*lk\.Public"):
        method(public=batch_of(8), rank=2)


@pytest.mark.parametrize("name", ["rank", "refresh_every", "start_step"])
@pytest.mark.parametrize("value", [0, 1.5, True])
def test_counts_are_counts(name: str, value: Any) -> None:
    for method in (lk.RPDPSGD, functools.partial(lk.PDPSGD, public=PUBLIC)):
        with pytest.raises(lk.ConfigError, match=name):
            method(**{"rank": 2, name: value})


def test_more_random_directions_than_coordinates_are_refused() -> None:
    with pytest.raises(lk.ConfigError, match="rank=9 is above the 8 coordinates"):
        lk.privatize(nn.Linear(3, 2), OPTIMIZERS["SGD"], method=lk.RPDPSGD(rank=9), plan=NOISE, clip_norm=1.0)


@pytest.mark.parametrize(
    ("examples", "count"),
    [({"x": torch.zeros(4, 2), "y": torch.zeros(4)}, 4), (torch.zeros(5, 2), 5), ((torch.zeros(6, 2), torch.zeros(6)), 6), (["a", "b"], 2)],
)
def test_a_record_names_public_examples_and_does_not_repeat_them(examples: Any, count: int) -> None:
    assert repr(lk.Public(examples, cross_entropy)) == f"Public({count} examples, loss=cross_entropy)"
    assert repr(lk.Public(examples, functools.partial(cross_entropy))) == f"Public({count} examples, loss=partial)"


# -- projections -------------------------------------------------------------------------------------------------------


def released(blocks: Mapping[str, Tensor]) -> Released:
    return Released(blocks=dict(blocks), noise_std=0.5, l2_bound=1.0, step=3)


def matrix_of_random_projection(rank: int, key: tuple[object, ...], rows: int = 2, width: int = 4) -> Tensor:
    """Apply it to every unit vector of two blocks."""
    columns = []
    for unit in torch.eye(3 * rows + width, dtype=torch.float64):
        refined = project_randomly(released({"a": unit[: 3 * rows].view(rows, 3), "b": unit[3 * rows :]}), rank, key)
        columns.append(torch.cat([refined.blocks["a"].flatten(), refined.blocks["b"]]))
    return torch.stack(columns, 1)


@pytest.mark.parametrize("drawn", [1, 30, 1 << 22])
def test_a_random_projection_is_one_positive_matrix_of_its_rank(drawn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # The package gives the module's name to a function.
    monkeypatch.setattr(importlib.import_module("lowkey.refine.project"), "_DRAWN_NUMBERS", drawn)
    matrix = matrix_of_random_projection(4, ("seed", 1))
    torch.testing.assert_close(matrix, matrix.T, rtol=0, atol=1e-12)
    values = torch.linalg.eigvalsh(matrix)
    assert int((values > 1e-9).sum()) == 4
    assert float(values.min()) > -1e-12
    assert torch.equal(matrix, matrix_of_random_projection(4, ("seed", 1)))
    assert not torch.allclose(matrix, matrix_of_random_projection(4, ("seed", 2)))


def test_random_projections_are_unbiased() -> None:
    rank, width, draws = 3, 5, 1500
    mean = torch.stack([matrix_of_random_projection(rank, ("seed", draw), rows=1, width=2) for draw in range(draws)]).mean(0)
    # An entry of V^T V is a sum of `rank` products of normals: variance 2 / rank on the diagonal and 1 / rank off it.
    unit = math.sqrt(2 * width / rank / draws)
    # alpha = 1e-6: two-sided for the trace, and over 10 entries for the others, whose law is near normal at 1500 draws.
    assert abs(float(mean.trace()) - width) < 4.9 * unit
    assert float((mean - mean.diag().diag()).abs().max()) < 5.4 * math.sqrt(1 / rank / draws)
    # Entries of variance 1.1 / rank would not pass.
    assert abs(1.1 * float(mean.trace()) - width) > 4.9 * unit


def test_a_projection_keeps_what_lies_in_the_subspace_and_drops_the_rest() -> None:
    directions = torch.linalg.qr(torch.randn(10, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0].T
    parts = {"a": directions[:, :6].reshape(3, 2, 3), "b": directions[:, 6:]}
    inside = directions.T @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    outside = torch.linalg.svd(directions)[2][-1]
    refined = project(released({"a": (inside + outside)[:6].view(2, 3), "b": (inside + outside)[6:]}), parts)
    torch.testing.assert_close(torch.cat([refined.blocks["a"].flatten(), refined.blocks["b"]]), inside, rtol=0, atol=1e-12)
    assert (refined.noise_std, refined.l2_bound, refined.step) == (0.5, 1.0, 3)


@pytest.mark.parametrize("sketch_first", [False, True])
def test_random_directions_are_redrawn_as_often_as_asked_and_follow_the_seed(sketch_first: bool) -> None:
    def steps(seed: int) -> list[Tensor]:
        torch.manual_seed(0)
        model, found = nn.Linear(30, 2).double(), []
        method = lk.RPDPSGD(rank=2, refresh_every=2, sketch_first=sketch_first)
        sgd = functools.partial(torch.optim.SGD, lr=1.0)
        with lk.privatize(model, sgd, method=method, plan=NOISE, clip_norm=1.0, noise=lk.SeededNoise(1), seed=seed) as private:
            for _ in range(4):
                before = model.weight.detach().clone()
                private.step()
                found.append((model.weight.detach() - before).flatten())
        return found

    first, second, third, fourth = steps(0)
    assert torch.linalg.matrix_rank(torch.stack([first, second]), rtol=1e-9) == 2
    # Two directions span the first two steps; the third step leaves them.
    assert torch.linalg.matrix_rank(torch.stack([first, second, third]), rtol=1e-9) == 3
    assert torch.linalg.matrix_rank(torch.stack([first, second, third, fourth]), rtol=1e-9) == 4
    assert all(torch.equal(mine, again) for mine, again in zip(steps(0), [first, second, third, fourth], strict=True))
    assert not torch.allclose(steps(1)[0], first)
