"""Two-sided sketches against dense products, and the power method against dense decompositions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lowkey.boundary import Provenance
from lowkey.factors import Axis, Dense, OneHot, Outer
from lowkey.sketch.carriers import Carriers, Core, Nothing
from lowkey.sketch.power_method import draw_carriers, power_iteration

ROWS, COLS, RANK, EXAMPLES = 7, 5, 2, 3
every_core = pytest.mark.parametrize("core", Core)
# With one position an outer product is smaller than what it stands for; with eleven it is larger, and is multiplied out.
every_length = pytest.mark.parametrize("positions", [1, 4, 11])


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(5)
    yield
    torch.set_default_dtype(torch.float32)


def carriers(core: Core, shape: tuple[int, ...] = (ROWS, COLS), *, zero: Axis | None = None) -> Carriers:
    left, right = torch.randn(shape[0], RANK), torch.randn(RANK, torch.Size(shape[1:]).numel())
    if core is not Core.ADDED:
        left, right = torch.linalg.qr(left)[0], torch.linalg.qr(right.T)[0].T
    left, right = left * (zero is not Axis.ROWS), right * (zero is not Axis.COLS)
    return Carriers(name="w", shape=shape, left=left, right=right, provenance=Provenance.RANDOM, core=core, zero=zero)


def products(sketch: Carriers, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Equation 2 of the paper, and the right block without the core where that is asked for."""
    left, right = gradients @ sketch.right.T, sketch.left.T @ gradients
    if sketch.core is Core.LEFT_ONLY:
        right = right @ (torch.eye(right.shape[-1]) - sketch.right.T @ sketch.right)
    return left, right


@every_core
@every_length
def test_both_blocks_are_the_products_of_each_gradient(core: Core, positions: int) -> None:
    sketch = carriers(core)
    rows, cols = torch.randn(EXAMPLES, positions, ROWS), torch.randn(EXAMPLES, positions, COLS)
    gradients = torch.einsum("btr,btc->brc", rows, cols)
    for found in (sketch.compress(Outer(rows, cols, (ROWS, COLS)), Axis.COLS), sketch.compress_dense(gradients)):
        assert list(found) == list(sketch.blocks)
        for block, expected in zip(found.values(), products(sketch, gradients), strict=True):
            torch.testing.assert_close(block.dense(), expected)
            assert tuple(block.dense().shape[1:]) in sketch.blocks.values()


@every_core
@pytest.mark.parametrize("looked_up", ["rows", "cols"])
def test_an_embedding_is_reduced_from_both_sides(core: Core, looked_up: str) -> None:
    sketch = carriers(core)
    width, other = (ROWS, COLS) if looked_up == "rows" else (COLS, ROWS)
    index, values = torch.randint(0, width, (EXAMPLES, 4)), torch.randn(EXAMPLES, 4, other)
    hot = torch.nn.functional.one_hot(index, width).double()
    rows, cols = (hot, values) if looked_up == "rows" else (values, hot)
    sides = (OneHot(index, width), values) if looked_up == "rows" else (values, OneHot(index, width))
    found = sketch.compress(Outer(*sides, (ROWS, COLS)), None)
    for block, expected in zip(found.values(), products(sketch, torch.einsum("btr,btc->brc", rows, cols)), strict=True):
        torch.testing.assert_close(block.dense(), expected)


@pytest.mark.parametrize("core", [Core.SUBTRACTED, Core.LEFT_ONLY])
@pytest.mark.parametrize("shape", [(ROWS, COLS), (6, 3, 2, 2)])
def test_decoding_projects_on_what_the_carriers_span(core: Core, shape: tuple[int, ...]) -> None:
    sketch = carriers(core, shape)
    gradient = torch.randn(shape)
    blocks = {name: block.value[0] for name, block in sketch.compress_dense(gradient[None]).items()}
    columns, rows = sketch.left @ sketch.left.T, sketch.right.T @ sketch.right
    flat = gradient.flatten(1)
    outside = (torch.eye(shape[0]) - columns) @ flat @ (torch.eye(flat.shape[1]) - rows)
    torch.testing.assert_close(sketch.decode(blocks), (flat - outside).view(shape))


def decoding_matrix(sketch: Carriers) -> Tensor:
    """The decoding as a matrix, one column for each released number."""
    sizes = [torch.Size(shape).numel() for shape in sketch.blocks.values()]
    columns = []
    for unit in torch.eye(sum(sizes)):
        parts = unit.split(sizes)
        columns.append(sketch.decode({name: part.view(shape) for (name, shape), part in zip(sketch.blocks.items(), parts, strict=True)}))
    return torch.stack([column.flatten() for column in columns], dim=1)


def test_the_decoded_noise_has_one_law_whether_the_core_is_clipped_once_or_twice() -> None:
    torch.manual_seed(1)
    twice = decoding_matrix(carriers(Core.SUBTRACTED))
    torch.manual_seed(1)
    once = decoding_matrix(carriers(Core.LEFT_ONLY))
    torch.testing.assert_close(once @ once.T, twice @ twice.T)
    # In an orthonormal basis of what the carriers span, r (p + q - r) dimensions, it is white.
    spectrum = torch.linalg.eigvalsh(twice @ twice.T)
    dimensions = RANK * (ROWS + COLS - RANK)
    torch.testing.assert_close(spectrum[-dimensions:], torch.ones(dimensions))
    torch.testing.assert_close(spectrum[:-dimensions], torch.zeros(len(spectrum) - dimensions))


def test_the_isometric_blocks_have_the_norm_of_the_projection() -> None:
    sketch = carriers(Core.LEFT_ONLY)
    gradients = torch.randn(EXAMPLES, ROWS, COLS)
    found = sketch.compress_dense(gradients)
    decoded = torch.stack([sketch.decode({name: block.value[b] for name, block in found.items()}) for b in range(EXAMPLES)])
    squares = sum(block.squared_norms() for block in found.values())
    torch.testing.assert_close(squares, decoded.square().sum((1, 2)))


def test_without_orthonormal_bases_decoding_is_the_adjoint() -> None:
    sketch = carriers(Core.ADDED)
    gradient, x, y = torch.randn(ROWS, COLS), torch.randn(ROWS, RANK), torch.randn(RANK, COLS)
    left, right = (block.value[0] for block in sketch.compress_dense(gradient[None]).values())
    there = (left * x).sum() + (right * y).sum()
    torch.testing.assert_close((gradient * sketch.decode({"w.left": x, "w.right": y})).sum(), there)


@pytest.mark.parametrize(("zero", "block"), [(Axis.ROWS, "w.right"), (Axis.COLS, "w.left")])
def test_a_basis_of_zeros_makes_exactly_nothing(zero: Axis, block: str) -> None:
    sketch = carriers(Core.ADDED, zero=zero)
    outer = Outer(torch.randn(EXAMPLES, 4, ROWS), torch.randn(EXAMPLES, 4, COLS) * 1e30, (ROWS, COLS))
    found = sketch.compress(outer, None)[block]
    assert isinstance(found, Nothing)
    assert found.numel == 0
    assert found.without(torch.ones(EXAMPLES, dtype=torch.bool)) is found
    total = torch.ones(sketch.blocks[block])
    found.add_sum(total, torch.ones(EXAMPLES))
    assert total.eq(1.0).all()
    assert found.squared_norms().eq(0.0).all()
    assert torch.equal(found.dense(), torch.zeros(EXAMPLES, *sketch.blocks[block]))


@pytest.mark.parametrize(("positions", "kind", "dtype"), [(1, Outer, torch.bfloat16), (11, Dense, torch.float32)])
def test_what_is_small_stays_in_half_precision_and_sums_are_taken_in_single(positions: int, kind: type, dtype: torch.dtype) -> None:
    sketch = carriers(Core.SUBTRACTED)
    outer = Outer(torch.randn(1, positions, ROWS).bfloat16(), torch.randn(1, positions, COLS).bfloat16(), (ROWS, COLS))
    for block in sketch.compress(outer, None).values():
        assert isinstance(block, kind)
        assert (block.cols if isinstance(block, Outer) else block.dense()).dtype == dtype


# -- the power method --------------------------------------------------------------------------------------------------


def gram_schmidt(columns: Tensor) -> Tensor:
    """Orthonormalise one column after the other, as the paper does."""
    done: list[Tensor] = []
    for column in columns.T:
        for other in done:
            column = column - other * (other @ column)
        done.append(column / column.norm())
    return torch.stack(done, dim=1)


def algorithm_2(matrix: Tensor, right: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    left = torch.empty(0)
    for _ in range(iterations):
        left = gram_schmidt(matrix @ right.T)
        right = left.T @ matrix
    return left, gram_schmidt(right.T).T


@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_the_power_method_is_algorithm_2(iterations: int) -> None:
    matrix, start = torch.randn(ROWS, COLS), torch.randn(RANK, COLS)
    left, right = power_iteration(matrix, torch.randn(ROWS, RANK), start, iterations)
    expected_left, expected_right = algorithm_2(matrix, start, iterations)
    torch.testing.assert_close(left @ left.T, expected_left @ expected_left.T)
    torch.testing.assert_close(right.T @ right, expected_right.T @ expected_right)


def test_many_iterations_reach_the_singular_vectors() -> None:
    u, _, v = torch.linalg.svd(torch.randn(ROWS, COLS), full_matrices=False)
    matrix = u @ torch.diag(torch.tensor([5.0, 3.0, 1.0, 0.5, 0.1])) @ v
    left, right = power_iteration(matrix, *draw_carriers(ROWS, COLS, RANK, ("start",)), 30)
    torch.testing.assert_close(left @ left.T, u[:, :RANK] @ u[:, :RANK].T)
    torch.testing.assert_close(right.T @ right, v[:RANK].T @ v[:RANK])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_matrix_of_zeros_leaves_carriers_where_they_were(dtype: torch.dtype) -> None:
    start = tuple(side.to(dtype) for side in draw_carriers(ROWS, COLS, RANK, ("start",)))
    left, right = power_iteration(torch.zeros(ROWS, COLS, dtype=dtype), *start, 1)
    torch.testing.assert_close(left @ left.T, start[0] @ start[0].T)
    torch.testing.assert_close(right.T @ right, start[1].T @ start[1])


def test_carriers_of_a_matrix_of_lower_rank_are_orthonormal_all_the_same() -> None:
    matrix = torch.outer(torch.randn(ROWS), torch.randn(COLS))
    left, right = power_iteration(matrix, *draw_carriers(ROWS, COLS, RANK, ("start",)), 2)
    torch.testing.assert_close(left.T @ left, torch.eye(RANK))
    torch.testing.assert_close(right @ right.T, torch.eye(RANK))


def test_drawn_carriers_are_orthonormal_and_follow_their_key() -> None:
    left, right = draw_carriers(6, 6, RANK, ("one",))
    torch.testing.assert_close(left.T @ left, torch.eye(RANK))
    torch.testing.assert_close(right @ right.T, torch.eye(RANK))
    assert torch.equal(left, draw_carriers(6, 6, RANK, ("one",))[0])
    assert not torch.equal(left, draw_carriers(6, 6, RANK, ("other",))[0])
    # A square matrix's two sides are not one draw: the cosine of one with itself would be one.
    assert float((left * right.T).sum().abs()) / RANK < 0.9


def test_dense_blocks_stay_dense() -> None:
    found = carriers(Core.LEFT_ONLY).compress_dense(torch.randn(EXAMPLES, ROWS, COLS))
    assert all(isinstance(block, Dense) for block in found.values())
