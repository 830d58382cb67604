"""Do coordinates and residual make up the gradient, and is the residual's norm never understated?"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowkey.boundary import Provenance
from lowkey.factors import Axis, Dense, OneHot, Outer
from lowkey.sketch import residual
from lowkey.sketch.residual import Residual, WithResidual

WEIGHT = 2.5
seeds = st.integers(0, 2**31)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def directions(rank: int, *shape: int, seed: int = 0) -> Tensor:
    width = torch.Size(shape).numel()
    return torch.linalg.qr(normal(width, rank, seed=seed))[0].T.reshape(rank, *shape)


def gradients_of(outer: Outer) -> Tensor:
    """Each example's gradient, position by position."""
    rows, cols = (
        torch.eye(side.size, dtype=torch.float64)[side.index] if isinstance(side, OneHot) else side.double()
        for side in (outer.rows, outer.cols)
    )
    return torch.einsum("btr,btc->brc", rows, cols)


def dense_residual(gradients: Tensor, matrix: Tensor) -> Tensor:
    """`weight (I - V^T V) g`, with the projector as one matrix."""
    basis = matrix.double().flatten(1)
    outside = torch.eye(basis.shape[1], dtype=torch.float64) - basis.T @ basis
    return WEIGHT * (gradients.double().flatten(1) @ outside).reshape(gradients.shape)


def sketch_of(matrix: Tensor) -> WithResidual:
    return WithResidual("w", matrix, WEIGHT, Provenance.PUBLIC)


@st.composite
def outers(draw: st.DrawFn) -> Outer:
    """Wide matrices from one or two positions, which stay factored."""
    batch, positions, seed = draw(st.integers(1, 4)), draw(st.integers(1, 2)), draw(seeds)
    rows, cols = draw(st.integers(6, 9)), draw(st.integers(6, 9))
    right = normal(batch, positions, cols, seed=seed + 1)
    if draw(st.booleans()):
        return Outer(OneHot(torch.randint(0, rows, (batch, positions), generator=generator(seed)), rows), right, (rows, cols))
    return Outer(normal(batch, positions, rows, seed=seed), right, (rows, cols))


@given(outers(), st.integers(1, 5), seeds)
def test_the_residual_is_what_the_projector_leaves(outer: Outer, rank: int, seed: int) -> None:
    matrix = directions(rank, *outer.shape, seed=seed)
    blocks = sketch_of(matrix).compress(outer, None)
    expected = dense_residual(gradients_of(outer), matrix)
    weights = torch.linspace(0.5, 2.0, len(expected), dtype=torch.float64)
    total = torch.ones(outer.shape, dtype=torch.float64)
    blocks["w.residual"].add_sum(total, weights)
    assert isinstance(blocks["w.residual"], Residual)
    torch.testing.assert_close(blocks["w.residual"].dense(), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(total, 1.0 + torch.einsum("b,brc->rc", weights, expected), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(blocks["w.residual"].squared_norms(), expected.square().sum((1, 2)), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", [(3,), (4, 2), (2, 3, 2, 2)])
def test_full_gradients_are_split_alike(shape: tuple[int, ...]) -> None:
    matrix, gradients = directions(2, *shape), normal(4, *shape, seed=2)
    blocks = sketch_of(matrix).compress_dense(gradients)
    torch.testing.assert_close(blocks["w.residual"].dense(), dense_residual(gradients, matrix), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(blocks["w.coordinates"].dense(), gradients.flatten(1) @ matrix.flatten(1).T, rtol=1e-12, atol=1e-12)


def test_both_parts_decode_to_the_gradient() -> None:
    outer = Outer(normal(3, 1, 7), normal(3, 1, 8, seed=1), (7, 8))
    sketch = sketch_of(directions(4, 7, 8))
    blocks = {name: block.dense().sum(0) for name, block in sketch.compress(outer, None).items()}
    assert {name: tuple(block.shape) for name, block in blocks.items()} == dict(sketch.blocks)
    torch.testing.assert_close(sketch.decode(blocks), gradients_of(outer).sum(0), rtol=1e-12, atol=1e-12)


def test_no_input_is_reduced_and_nothing_passes_for_the_identity() -> None:
    sketch = sketch_of(directions(4, 7, 8))
    assert [sketch.basis(axis) for axis in Axis] == [None, None]
    assert not sketch.is_identity


def test_matrices_smaller_than_their_factors_are_split_in_full() -> None:
    outer = Outer(normal(2, 9, 3), normal(2, 9, 2, seed=1), (3, 2))
    matrix = directions(2, 3, 2)
    block = sketch_of(matrix).compress(outer, None)["w.residual"]
    assert isinstance(block, Dense)
    torch.testing.assert_close(block.value, dense_residual(gradients_of(outer), matrix), rtol=1e-12, atol=1e-12)


def test_an_example_that_is_left_out_is_exactly_zero() -> None:
    outer = Outer(normal(3, 1, 7), normal(3, 1, 8, seed=1), (7, 8))
    outer.rows[1] = torch.nan
    block = sketch_of(directions(4, 7, 8)).compress(outer, None)["w.residual"]
    kept = block.without(torch.tensor([False, True, False]))
    total = torch.zeros(7, 8, dtype=torch.float64)
    kept.add_sum(total, torch.ones(3, dtype=torch.float64))
    assert bool(torch.isfinite(total).all())
    assert not bool(torch.isfinite(block.squared_norms()[1]))
    assert kept.squared_norms()[1] == 0.0


# -- a difference of long terms ----------------------------------------------------------------------------------------


def nearly_inside(distance: float, seed: int, size: int = 96, rank: int = 24) -> tuple[Outer, Tensor]:
    """Float32 gradients of rank one whose part outside the subspace is `distance` of them."""
    rows, cols = normal(64, size, seed=seed), normal(64, size, seed=seed + 1)
    spanning = torch.einsum("br,bc->brc", rows[:rank], cols[:rank]).flatten(1)
    matrix = torch.linalg.qr(spanning.T)[0].T.reshape(rank, size, size)
    near = rows[:rank] + distance * rows[rank : 2 * rank]
    scale = torch.logspace(-3, 3, rank, dtype=torch.float64)[:, None]
    return Outer((near * scale).float()[:, None], cols[:rank].float()[:, None], (size, size)), matrix.float()


def largest_contribution(outer: Outer, matrix: Tensor, *, whole: bool = False) -> float:
    """How long, in units of its limit, the longest residual is that one example adds after clipping to a limit of one."""
    block = sketch_of(matrix).compress(outer, None)["w.residual"]
    assert isinstance(block, Residual)
    if whole:
        # The norm of an outer product has a margin of its own; that of a gradient in full has none.
        block = dataclasses.replace(block, whole=Dense(outer.dense()))
    weights = block.squared_norms().rsqrt()
    lengths = []
    for row in range(len(weights)):
        total = torch.zeros(outer.shape)
        block.add_sum(total, weights * (torch.arange(len(weights)) == row))
        lengths.append(float(total.double().norm()))
    return max(lengths)


DISTANCES = [0.0, 1e-7, 1e-5, 1e-4, 3e-4, 1e-3, 1e-2, 1.0]


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("seed", [1, 5])
@pytest.mark.parametrize("whole", [False, True])
def test_a_gradient_near_the_subspace_never_passes_its_limit(distance: float, seed: int, whole: bool) -> None:
    assert largest_contribution(*nearly_inside(distance, seed), whole=whole) <= 1.0 + 1e-6


@pytest.mark.parametrize("distance", DISTANCES)
def test_nor_does_it_where_the_directions_are_not_orthonormal(distance: float) -> None:
    outer, matrix = nearly_inside(distance, 3)
    assert largest_contribution(outer, matrix * 1.01) <= 1.0 + 1e-6


@pytest.mark.parametrize("distance", [0.01, 0.1, 1.0])
def test_the_norm_is_tight_away_from_the_subspace(distance: float) -> None:
    outer, matrix = nearly_inside(distance, 1)
    found = sketch_of(matrix).compress(outer, None)["w.residual"].squared_norms().double()
    exact = dense_residual(gradients_of(outer), matrix).square().sum((1, 2))
    # The margin is 16 units of rounding of the whole gradient, that of its own norm and of the sum of terms another 16.
    slack = 32 * torch.finfo(torch.float32).eps * WEIGHT**2 * gradients_of(outer).square().sum((1, 2))
    assert bool((found - exact).abs().le(slack).all())


@pytest.mark.parametrize("margin", [0.0, 1.0, 4.0])
def test_without_the_margin_or_with_less_rounding_would_raise_the_limit(margin: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual, "_MARGIN", margin)
    # Four of them: the rounding of a single one may happen to fall on the safe side.
    assert max(largest_contribution(*nearly_inside(1e-3, seed), whole=True) for seed in (1, 3, 5, 7)) > 1.01


@pytest.mark.parametrize("distance", [1e-4, 1e-3])
def test_a_norm_that_takes_rounded_directions_for_orthonormal_would_raise_the_limit(
    distance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer, matrix = nearly_inside(distance, 3)
    monkeypatch.setattr(WithResidual, "overlap", torch.eye(len(matrix)))
    assert largest_contribution(outer, matrix * 1.01) > 1.01


@pytest.mark.parametrize("distance", [1e-3, 1e-2])
def test_autocast_around_the_backward_pass_leaves_the_limit_in_place(distance: float) -> None:
    outer, matrix = nearly_inside(distance, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        block = sketch_of(matrix).compress(outer, None)["w.residual"]
    exact = sketch_of(matrix).compress(outer, None)["w.residual"]
    assert torch.equal(block.squared_norms(), exact.squared_norms())
