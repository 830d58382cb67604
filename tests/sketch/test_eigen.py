"""Are the leading directions those of a dense eigendecomposition, however the gradients are cut and held?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from torch import Tensor

import lowkey as lk
from lowkey.sketch import eigen
from lowkey.sketch.eigen import leading_directions

SHAPES = {"a": (4, 3), "b": (7,), "c": (2, 2, 3)}
Stream = Callable[[], Iterator[Mapping[str, Tensor]]]


def gradients_of(num_examples: int, *, decay: float = 0.6, dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Tensor]:
    """Gradients whose singular values fall like a power law, as those of networks do."""
    generator = torch.Generator().manual_seed(seed)
    width = sum(math.prod(shape) for shape in SHAPES.values())
    left, _ = torch.linalg.qr(torch.randn(num_examples, num_examples, generator=generator, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))
    count = min(num_examples, width)
    values = torch.arange(1, count + 1, dtype=torch.float64) ** -decay
    flat = (left[:, :count] * values) @ right[:count]
    parts = flat.to(dtype).split([math.prod(shape) for shape in SHAPES.values()], 1)
    return {name: part.reshape(num_examples, *shape) for (name, shape), part in zip(SHAPES.items(), parts, strict=True)}


def in_chunks(gradients: Mapping[str, Tensor], size: int) -> Stream:
    count = len(next(iter(gradients.values())))
    return lambda: ({name: value[start : start + size] for name, value in gradients.items()} for start in range(0, count, size))


def flat(blocks: Mapping[str, Tensor], names: list[str]) -> Tensor:
    return torch.cat([blocks[name].double().flatten(1) for name in names], 1)


def projector(basis: Tensor) -> Tensor:
    return basis.T @ basis


def dense_projector(gradients: Tensor, rank: int) -> Tensor:
    """From the eigendecomposition of the second moment itself, over all coordinates."""
    vectors = torch.linalg.eigh(gradients.T @ gradients / len(gradients))[1][:, -rank:]
    return vectors @ vectors.T


@pytest.mark.parametrize("num_examples", [3, 12, 60])
@pytest.mark.parametrize("size", [1, 5, 100])
def test_the_joint_eigenspace_is_that_of_the_dense_second_moment(num_examples: int, size: int) -> None:
    gradients, names = gradients_of(num_examples), list(SHAPES)
    basis = flat(leading_directions(in_chunks(gradients, size), [names], 3), names)
    assert float((projector(basis) - dense_projector(flat(gradients, names), 3)).abs().max()) < 1e-12


def test_the_strongest_direction_comes_first() -> None:
    gradients, names = gradients_of(12), list(SHAPES)
    basis = flat(leading_directions(in_chunks(gradients, 5), [names], 6), names)
    strengths = (flat(gradients, names) @ basis.T).norm(dim=0)
    # The singular values that the gradients were made with.
    torch.testing.assert_close(strengths, torch.arange(1, 7, dtype=torch.float64) ** -0.6, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", SHAPES)
def test_groups_apart_have_eigenspaces_of_their_own(name: str) -> None:
    gradients = gradients_of(12)
    basis = leading_directions(in_chunks(gradients, 5), [[name] for name in SHAPES], 2)
    assert float((projector(flat(basis, [name])) - dense_projector(flat(gradients, [name]), 2)).abs().max()) < 1e-12


@pytest.mark.parametrize("held", [0, 40, 93, 400])
@pytest.mark.parametrize("size", [1, 4, 7, 100])
def test_gradients_that_do_not_fit_give_the_same_basis(held: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names = list(SHAPES)
    stream = in_chunks(gradients_of(17), size)
    whole = flat(leading_directions(stream, [names], 3), names)
    monkeypatch.setattr(eigen, "_HELD_NUMBERS", held)
    passed = flat(leading_directions(stream, [names], 3), names)
    assert float((projector(passed) - projector(whole)).abs().max()) < 1e-13


def test_no_more_examples_are_held_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, alive, most = 0, [0], [0]

    class Chunk(dict[str, Tensor]):
        """Counts how many of its kind live."""

        def __init__(self, blocks: Mapping[str, Tensor]) -> None:
            super().__init__(blocks)
            alive[0] += 1
            most[0] = max(most[0], alive[0])

        def __del__(self) -> None:
            alive[0] -= 1

    def stream() -> Iterator[Mapping[str, Tensor]]:
        nonlocal passes
        passes += 1
        yield from in_chunks(gradients_of(20), 1)()

    cut = eigen._cut
    monkeypatch.setattr(eigen, "_cut", lambda chunk, rows: Chunk(cut(chunk, rows)))
    monkeypatch.setattr(eigen, "_HELD_NUMBERS", 0)
    leading_directions(stream, [list(SHAPES)], 4)
    # Four held, and the chunk under way, which is cut twice; 20 examples in windows of four, and one pass for the basis.
    assert most[0] <= 4 + 4
    assert passes == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_directions_that_the_gradients_do_not_have_are_zero(dtype: torch.dtype) -> None:
    gradients, names = gradients_of(4, dtype=dtype), list(SHAPES)
    doubled = {name: torch.cat([value, 2 * value, value + value.flip(0)]) for name, value in gradients.items()}
    basis = flat(leading_directions(in_chunks(doubled, 5), [names], 9), names)
    assert [bool(row.any()) for row in basis] == [True] * 4 + [False] * 5
    assert float((projector(basis) - dense_projector(flat(gradients, names), 4)).abs().max()) < (1e-5 if dtype == torch.float32 else 1e-12)


def test_gradients_that_are_all_zero_have_no_direction() -> None:
    stream = in_chunks({name: torch.zeros(3, *shape) for name, shape in SHAPES.items()}, 2)
    assert not any(bool(part.any()) for part in leading_directions(stream, [list(SHAPES)], 2).values())


@pytest.mark.parametrize("decay", [0.6, 6.0, 12.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_are_orthonormal_however_fast_the_spectrum_falls(decay: float, dtype: torch.dtype) -> None:
    names = list(SHAPES)
    basis = flat(leading_directions(in_chunks(gradients_of(12, decay=decay, dtype=dtype), 5), [names], 12), names)
    kept = basis[basis.norm(dim=1) > 0]
    assert len(kept) >= 2
    error = float((kept @ kept.T - torch.eye(len(kept), dtype=torch.float64)).abs().max())
    assert error < 20 * torch.finfo(dtype).eps


def test_a_gradient_that_is_not_finite_is_refused() -> None:
    gradients = gradients_of(4)
    gradients["b"][2, 0] = math.nan
    with pytest.raises(lk.ConfigError, match="not finite"):
        leading_directions(in_chunks(gradients, 3), [list(SHAPES)], 2)


def test_the_basis_of_26000_coordinates_is_the_dense_one_to_a_millionth() -> None:
    # A dense eigendecomposition of this size takes minutes; that of the same space seen from a QR basis of it takes none.
    generator = torch.Generator().manual_seed(1)
    scales = torch.arange(1, 101, dtype=torch.float64) ** -0.6
    gradients = (torch.randn(100, 100, generator=generator, dtype=torch.float64) * scales) @ torch.randn(
        100, 26_000, generator=generator, dtype=torch.float64
    )
    found = leading_directions(lambda: iter([{"w": gradients}]), [["w"]], 50)["w"]
    frame, triangle = torch.linalg.qr(gradients.T)
    vectors = frame @ torch.linalg.eigh(triangle @ triangle.T)[1][:, -50:]
    assert float(torch.linalg.svdvals(found @ vectors).min()) > 1 - 1e-12
    assert float((found @ found.T - torch.eye(50, dtype=torch.float64)).abs().max()) < 1e-13
