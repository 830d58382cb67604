"""Is the shared sketch the inner product with its directions, in every form that a gradient comes in?"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowkey.boundary import Provenance
from lowkey.factors import Axis, OneHot, Outer
from lowkey.sketch import Shared, shared

sizes = st.integers(1, 5)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def gradients_of(outer: Outer) -> Tensor:
    """Each example's gradient, position by position."""
    rows, cols = (
        torch.eye(side.size, dtype=torch.float64)[side.index] if isinstance(side, OneHot) else side.double()
        for side in (outer.rows, outer.cols)
    )
    return torch.einsum("btr,btc->brc", rows, cols)


def inner_products(gradients: Tensor, matrix: Tensor) -> Tensor:
    return torch.stack([torch.stack([(gradient * direction.view_as(gradient)).sum() for direction in matrix]) for gradient in gradients])


@st.composite
def outers(draw: st.DrawFn) -> Outer:
    batch, positions, rows, cols = (draw(sizes) for _ in range(4))
    seed = draw(st.integers(0, 2**31))
    left, right = normal(batch, positions, rows, seed=seed), normal(batch, positions, cols, seed=seed + 1)
    form = draw(st.sampled_from(["numbers", "rows by index", "columns by index"]))
    if form == "rows by index":
        return Outer(OneHot(torch.randint(0, rows, (batch, positions), generator=generator(seed)), rows), right, (rows, cols))
    if form == "columns by index":
        return Outer(left, OneHot(torch.randint(0, cols, (batch, positions), generator=generator(seed)), cols), (rows, cols))
    return Outer(left, right, (rows, cols))


@given(outers(), sizes, st.sampled_from([1, 7, 1 << 24]))
def test_coordinates_of_an_outer_product_are_inner_products_however_it_is_cut(outer: Outer, rank: int, elements: int) -> None:
    matrix = normal(rank, *outer.shape, seed=9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "_CHUNK_ELEMENTS", elements)
        found = Shared("w", matrix, Provenance.PUBLIC).compress(outer, None)["subspace"].value
    torch.testing.assert_close(found, inner_products(gradients_of(outer), matrix), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(), (3,), (4, 2), (2, 3, 2, 2)])
def test_coordinates_of_full_gradients_are_inner_products(shape: tuple[int, ...]) -> None:
    matrix, gradients = normal(3, *shape, seed=1), normal(4, *shape, seed=2)
    found = Shared("w", matrix, Provenance.PUBLIC).compress_dense(gradients)["subspace"].value
    torch.testing.assert_close(found, inner_products(gradients, matrix), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(), (3,), (4, 2), (2, 3, 2, 2)])
def test_decoding_is_the_adjoint(shape: tuple[int, ...]) -> None:
    sketch = Shared("w", normal(3, *shape, seed=1), Provenance.RANDOM)
    gradient, coordinates = normal(1, *shape, seed=2), normal(3, seed=3)
    there = sketch.compress_dense(gradient)["subspace"].value[0] @ coordinates
    back = (gradient[0] * sketch.decode({"subspace": coordinates})).sum()
    torch.testing.assert_close(there, back, rtol=1e-12, atol=1e-12)


def test_a_convolution_weight_is_sketched_as_the_matrix_of_its_filters() -> None:
    outer = Outer(normal(2, 5, 3, seed=1), normal(2, 5, 8, seed=2), (3, 2, 2, 2))
    sketch = Shared("w", normal(4, 3, 2, 2, 2, seed=3), Provenance.PUBLIC)
    dense = sketch.compress_dense(gradients_of(outer).view(2, 3, 2, 2, 2))["subspace"].value
    torch.testing.assert_close(sketch.compress(outer, None)["subspace"].value, dense, rtol=1e-12, atol=1e-12)


def test_half_precision_gradients_are_summed_in_float32() -> None:
    sketch = Shared("w", torch.ones(1, 4096), Provenance.PUBLIC)
    found = sketch.compress_dense(torch.full((1, 4096), 1.0, dtype=torch.bfloat16))["subspace"].value
    assert found.dtype == torch.float32
    assert found.item() == 4096.0


def test_all_parameters_fill_one_block_and_keep_their_inputs_whole() -> None:
    sketch = Shared("w", normal(3, 4, 2), Provenance.PUBLIC)
    assert dict(sketch.blocks) == {"subspace": (3,)}
    assert not sketch.is_identity
    assert [sketch.basis(axis) for axis in Axis] == [None, None]


def test_no_full_batch_of_gradients_is_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_CHUNK_ELEMENTS", 2 * 8 * 16)
    largest = 0
    multiply = torch.Tensor.__matmul__

    def noted(left: Tensor, right: Tensor) -> Tensor:
        nonlocal largest
        product = multiply(left, right)
        largest = max(largest, product.numel())
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", noted)
    Shared("w", normal(3, 64, 16), Provenance.PUBLIC).compress(Outer(normal(8, 2, 64), normal(8, 2, 16), (64, 16)), None)
    assert 0 < largest <= 2 * 8 * 16
