"""Do factored gradients keep the promises that clipping and summing rest on, for all shapes and values?"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowkey.boundary import Provenance
from lowkey.factors import Axis, Dense, Factor, OneHot, Outer
from lowkey.factors.factor import Union, combine
from lowkey.sketch import Distribution, OneSided, draw_basis

sizes = st.integers(1, 6)
seeds = st.integers(0, 2**31)
dtypes = st.sampled_from([torch.float32, torch.float64])
scales = st.sampled_from([1e-6, 1.0, 1e4])


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@st.composite
def outers(draw: st.DrawFn, dtype: torch.dtype | None = None) -> Outer:
    """Factors whose positions often cancel, which is where a Gram norm loses digits."""
    batch, positions, rows, cols = (draw(sizes) for _ in range(4))
    kind = dtype or draw(dtypes)
    source = generator(draw(seeds))
    left = torch.randn(batch, positions, rows, generator=source, dtype=kind) * draw(scales)
    right = torch.randn(batch, positions, cols, generator=source, dtype=kind)
    if draw(st.booleans()):
        nearly = 1.0 + draw(st.sampled_from([0.0, 1e-7, 1e-3])) * torch.randn(left.shape, generator=source, dtype=kind)
        left, right = torch.cat([left, -left * nearly], 1), torch.cat([right, right], 1)
    return Outer(left, right, (rows, cols))


@st.composite
def lookups(draw: st.DrawFn) -> Outer:
    batch, positions, rows, cols = (draw(sizes) for _ in range(4))
    source = generator(draw(seeds))
    index = torch.randint(0, rows, (batch, positions), generator=source)
    return Outer(OneHot(index, rows), torch.randn(batch, positions, cols, generator=source, dtype=torch.float64), (rows, cols))


def exactly(outer: Outer) -> Tensor:
    """Each example's gradient, summed in float64 from the numbers as they are."""
    rows, cols = (
        torch.eye(side.size, dtype=torch.float64)[side.index] if isinstance(side, OneHot) else side.double()
        for side in (outer.rows, outer.cols)
    )
    return torch.einsum("btr,btc->brc", rows, cols)


def exact_squares(outer: Outer) -> Tensor:
    return exactly(outer).flatten(1).square().sum(1)


@given(outers())
def test_gram_norm_is_never_below_the_dense_norm(outer: Outer) -> None:
    exact = exact_squares(outer)
    # The dense norm is itself rounded, to 1e-12 of the largest sum that its terms could have had.
    bound = (outer.rows.double().norm(dim=2) * outer.cols.double().norm(dim=2)).sum(1).square()
    assert bool((outer.squared_norms().double() >= exact - 1e-12 * bound).all())


@given(outers())
def test_gram_norm_is_tight_where_nothing_cancels(outer: Outer) -> None:
    bound = (outer.rows.double().norm(dim=2) * outer.cols.double().norm(dim=2)).sum(1).square()
    slack = 64 * torch.finfo(outer.rows.dtype).eps * bound
    assert bool((outer.squared_norms().double() <= exact_squares(outer) + slack).all())


@given(lookups())
def test_norm_of_a_lookup_is_the_dense_norm(outer: Outer) -> None:
    torch.testing.assert_close(outer.squared_norms(), exact_squares(outer), rtol=1e-12, atol=1e-12)


@given(outers(torch.float64))
def test_a_compacted_factor_is_the_same_gradient(outer: Outer) -> None:
    torch.testing.assert_close(
        outer.compacted().dense(), exactly(outer), rtol=1e-12, atol=1e-6 * float(exactly(outer).abs().max()) + 1e-300
    )


@st.composite
def uses(draw: st.DrawFn) -> list[Factor]:
    """Several uses of one weight: as a table, as a matrix, and in full."""
    batch, rows, cols = (draw(sizes) for _ in range(3))
    source = generator(draw(seeds))
    made: list[Factor] = []
    for kind in draw(st.lists(st.sampled_from(["table", "matrix", "turned table", "full"]), min_size=1, max_size=4)):
        positions = draw(sizes)
        left = torch.randn(batch, positions, rows, generator=source, dtype=torch.float64)
        right = torch.randn(batch, positions, cols, generator=source, dtype=torch.float64)
        if kind == "table":
            made.append(Outer(OneHot(torch.randint(0, rows, (batch, positions), generator=source), rows), right, (rows, cols)))
        elif kind == "turned table":
            made.append(Outer(left, OneHot(torch.randint(0, cols, (batch, positions), generator=source), cols), (rows, cols)))
        elif kind == "matrix":
            made.append(Outer(left, right, (rows, cols)))
        else:
            made.append(Dense(torch.randn(batch, rows, cols, generator=source, dtype=torch.float64)))
    return made


def total(factors: Sequence[Factor]) -> Tensor:
    return torch.stack([exactly(factor) if isinstance(factor, Outer) else factor.dense() for factor in factors]).sum(0)


@given(uses())
def test_several_uses_have_the_norm_of_their_sum(factors: list[Factor]) -> None:
    expected = total(factors)
    found = combine(factors).squared_norms()
    torch.testing.assert_close(found, expected.flatten(1).square().sum(1), rtol=1e-9, atol=1e-9)


@given(uses(), seeds)
def test_weighted_sum_of_factors_is_that_of_the_dense_gradients(factors: list[Factor], seed: int) -> None:
    expected = total(factors)
    weights = torch.rand(len(expected), generator=generator(seed), dtype=torch.float64)
    found = torch.ones_like(expected[0])
    combine(factors).add_sum(found, weights)
    torch.testing.assert_close(found, 1.0 + torch.einsum("b,brc->rc", weights, expected), rtol=1e-10, atol=1e-10)


@given(uses(), seeds)
def test_a_blanked_example_adds_exactly_nothing(factors: list[Factor], seed: int) -> None:
    batch = len(total(factors))
    bad = torch.rand(batch, generator=generator(seed)) < 0.5
    spoiled = [_spoil(factor, bad) for factor in factors]
    blanked = combine(spoiled).without(bad)
    assert not blanked.dense()[bad].any()
    torch.testing.assert_close(blanked.dense()[~bad], total(factors)[~bad], rtol=1e-10, atol=1e-10)


def _spoil(factor: Factor, bad: Tensor) -> Factor:
    if isinstance(factor, Dense):
        return Dense(factor.value.masked_fill(bad[:, None, None], torch.nan))
    assert isinstance(factor, Outer)
    rows, cols = (
        side if isinstance(side, OneHot) else side.masked_fill(bad[:, None, None], torch.inf) for side in (factor.rows, factor.cols)
    )
    return Outer(rows, cols, factor.shape)


def test_the_norm_of_a_union_counts_what_its_parts_share() -> None:
    part = Outer(OneHot(torch.tensor([[0]]), 2), torch.tensor([[[3.0, 4.0]]]), (2, 2))
    # Two equal uses double the gradient, so the square is 4 * 25; the sum of their squares would be 50.
    assert Union((part, part)).squared_norms().item() == pytest.approx(100.0, rel=1e-5)


@st.composite
def sketched(draw: st.DrawFn) -> tuple[OneSided, Outer]:
    outer = draw(st.one_of(outers(torch.float64), lookups()))
    axis = draw(st.sampled_from(Axis))
    width = outer.shape[0 if axis is Axis.ROWS else 1]
    rank = draw(st.integers(1, width))
    basis = draw_basis(draw(st.sampled_from(Distribution)), width, rank, (draw(seeds),))
    return OneSided("w", outer.shape, axis, basis, Provenance.RANDOM), outer


@given(sketched())
def test_sketch_of_the_factors_is_the_sketch_of_the_dense_gradients(case: tuple[OneSided, Outer]) -> None:
    sketch, outer = case
    expected = sketch.compress_dense(exactly(outer))["w"].value
    scale = float(expected.abs().max()) + float(exactly(outer).abs().max())
    torch.testing.assert_close(sketch.compress(outer, None)["w"].dense(), expected, rtol=1e-10, atol=1e-10 * scale + 1e-9)


@given(sketched())
def test_an_input_that_was_reduced_beforehand_gives_the_same_coordinates(case: tuple[OneSided, Outer]) -> None:
    sketch, outer = case
    basis = sketch.basis(sketch.axis)
    assert basis is not None
    reduced = (outer.rows, outer.cols @ basis) if sketch.axis is Axis.COLS else (outer.rows @ basis, outer.cols)
    found = sketch.compress(Outer(*reduced, outer.shape), sketch.axis)["w"].dense()
    torch.testing.assert_close(found, sketch.compress(outer, None)["w"].dense(), rtol=1e-10, atol=1e-8)


@given(sketched(), seeds)
def test_decode_is_the_adjoint_of_encode(case: tuple[OneSided, Outer], seed: int) -> None:
    sketch, _ = case
    source = generator(seed)
    weight = torch.randn(sketch.shape, generator=source, dtype=torch.float64)
    coordinates = torch.randn(sketch.proxy_shape, generator=source, dtype=torch.float64)
    left = (sketch.encode(weight)[sketch.name] * coordinates).sum()
    right = (weight * sketch.decode({"w": coordinates})).sum()
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)
