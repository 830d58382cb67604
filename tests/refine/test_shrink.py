"""Shrinking by the leading triplets alone is the paper's formula with a full decomposition, and misses nothing."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from dense_shrink import dense_shrink, spiked
from torch import Tensor

import lowkey as lk
from lowkey.refine import bulk_edge, shrink, shrink_all

LANCZOS = importlib.import_module("lowkey.refine.lanczos")
SPECTRUM = importlib.import_module("lowkey.refine.spectrum")
Patch = pytest.MonkeyPatch

SHAPES = [(30, 50), (50, 30), (1, 700), (200, 200), (160, 300), (300, 160)]
SPIKES = {"none": [], "one": [2.5], "close": [2.0, 1.95, 1.9], "strong and weak": [40.0, 1.5], "towering": [1e4, 3.0]}
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
"""Above 128 rows and columns the leading vectors are searched; below, all are taken."""


def with_largest(shape: tuple[int, int], value: float, seed: int = 0) -> Tensor:
    """A noise-like matrix whose largest singular value is known."""
    matrix = spiked(shape, [], seed=seed)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values * (0.97 * value / values[0])
    values[0] = value
    return left @ torch.diag(values) @ right


# -- the formula -------------------------------------------------------------------------------------------------------


@shapes
@pytest.mark.parametrize("spikes", SPIKES)
@pytest.mark.parametrize("norm_correction", [True, False])
def test_it_is_the_papers_formula(shape: tuple[int, int], spikes: str, norm_correction: bool) -> None:
    matrix = spiked(shape, SPIKES[spikes][: min(shape)], noise_std=1e-3)
    found = shrink(matrix, 1e-3, kappa=1.02, norm_correction=norm_correction)
    expected = dense_shrink(matrix, 1e-3, 1.02, norm_correction)
    # A residual of eps**.75 = 2e-12, over gaps between singular values of a percent or so.
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8 * float(expected.norm()))


@shapes
@pytest.mark.parametrize("spikes", SPIKES)
def test_float32_is_the_formula_too(shape: tuple[int, int], spikes: str) -> None:
    matrix = spiked(shape, SPIKES[spikes][: min(shape)], noise_std=1e-3).float()
    found, expected = shrink(matrix, 1e-3), dense_shrink(matrix, 1e-3, 1.02, norm_correction=True)
    assert found.dtype is torch.float32
    assert float((found - expected).norm()) <= 1e-4 * float(expected.norm())


@pytest.mark.parametrize("noise_std", [1e-7, 0.01, 0.3, 0.9])
def test_a_noise_level_far_below_the_entries_keeps_many_triplets(noise_std: float) -> None:
    matrix = spiked((160, 200), [])
    expected = dense_shrink(matrix, noise_std, 1.02, norm_correction=False)
    torch.testing.assert_close(shrink(matrix, noise_std, norm_correction=False), expected, rtol=1e-6, atol=1e-9 * float(expected.norm()))


def test_many_matrices_are_shrunk_as_each_by_itself() -> None:
    matrices = [spiked(shape, spikes, seed=seed) for seed, shape in enumerate(SHAPES) for spikes in ([], [3.0])]
    for one, found in zip(matrices, shrink_all(matrices, 1.0), strict=True):
        torch.testing.assert_close(found, shrink(one, 1.0), rtol=0.0, atol=0.0)


def test_gram_matrices_are_held_a_few_at_a_time(monkeypatch: Patch) -> None:
    matrices = [spiked((20, 30), spikes, seed=seed) for seed in range(5) for spikes in ([], [3.0])]
    together = shrink_all(matrices, 1.0)
    held: list[int] = []
    grams = SPECTRUM._grams
    monkeypatch.setattr(SPECTRUM, "_CHUNK_ELEMENTS", 3 * 20 * 20)
    monkeypatch.setattr(SPECTRUM, "_grams", lambda wide: (held.append(len(wide)), grams(wide))[1])
    for found, expected in zip(shrink_all(matrices, 1.0), together, strict=True):
        torch.testing.assert_close(found, expected)
    assert held == [3, 3, 3, 1]


def test_the_norm_is_kept_if_asked_for() -> None:
    matrix = spiked((60, 90), [3.0])
    assert float(shrink(matrix, 1.0).norm()) == pytest.approx(float(matrix.norm()), rel=1e-12)
    assert float(shrink(matrix, 1.0, norm_correction=False).norm()) < 0.5 * float(matrix.norm())


# -- detection ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(40, 60), (200, 200), (150, 500), (500, 150)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kappa", [1.0, 1.01, 1.1])
@pytest.mark.parametrize("seed", range(3))
def test_what_passes_the_threshold_is_never_missed_and_nothing_else_counts(
    shape: tuple[int, int], dtype: torch.dtype, kappa: float, seed: int
) -> None:
    threshold = kappa * bulk_edge(shape, 1e-3)
    above, below = (with_largest(shape, threshold * (1.0 + side), seed).to(dtype) for side in (3e-6, -3e-6))
    assert shrink(above, 1e-3, kappa=kappa) is not above
    assert shrink(below, 1e-3, kappa=kappa) is below


@pytest.mark.parametrize("rows", [300, 1000])
def test_entries_of_one_sign_do_not_deceive_the_proof(rows: int) -> None:
    """Their sums round in one direction more than random ones."""
    matrix = torch.rand(150, rows, generator=torch.Generator().manual_seed(0))
    largest = float(torch.linalg.svdvals(matrix.double())[0])
    for side, is_shrunk in ((1e-5, True), (-1e-5, False)):
        noise_std = largest / (1.0 + side) / 1.02 / bulk_edge((150, rows), 1.0)
        assert (shrink(matrix, noise_std) is not matrix) is is_shrunk


def test_pure_noise_takes_one_factorisation_and_no_decomposition(monkeypatch: Patch) -> None:
    monkeypatch.setattr(SPECTRUM, "leading_vectors", None)
    matrices = [spiked((150, 200), [], seed=seed).float() for seed in range(4)]
    assert all(found is matrix for found, matrix in zip(shrink_all(matrices, 1.0, kappa=1.1), matrices, strict=True))


def test_a_few_spikes_take_no_full_decomposition(monkeypatch: Patch) -> None:
    sizes: list[int] = []
    eigh = torch.linalg.eigh

    def watched(matrix: Tensor, **options: Any) -> Any:
        sizes.append(len(matrix))
        return eigh(matrix, **options)

    monkeypatch.setattr(torch.linalg, "eigh", watched)
    matrix = spiked((400, 500), [4.0, 3.0, 2.0]).float()
    assert shrink(matrix, 1.0) is not matrix
    assert max(sizes) <= 100


# -- the search is believed for its checks alone ------------------------------------------------------------------------


def without_the_first(found: Tensor) -> Tensor:
    return found[:, 1:]


def with_the_first_twice(found: Tensor) -> Tensor:
    return found[:, [0, *range(found.shape[1])]]


def turned_a_little(found: Tensor) -> Tensor:
    turned = found.clone()
    turned[:, 0] = (found[:, 0] + 1e-3 * torch.ones(len(found), dtype=found.dtype) / math.sqrt(len(found))) / math.sqrt(1 + 1e-6)
    return torch.linalg.qr(turned)[0]


def stretched(found: Tensor) -> Tensor:
    return 1.01 * found


def of_noise(found: Tensor) -> Tensor:
    return torch.eye(len(found), dtype=found.dtype)[:, : found.shape[1]]


@pytest.mark.parametrize("spoil", [without_the_first, with_the_first_twice, turned_a_little, stretched, of_noise])
def test_a_search_that_errs_costs_time_alone(monkeypatch: Patch, spoil: Any) -> None:
    search = LANCZOS._Lanczos.vectors_above
    monkeypatch.setattr(LANCZOS._Lanczos, "vectors_above", lambda self, level: spoil(search(self, level)))
    matrix = spiked((160, 200), [3.0, 2.0])
    expected = dense_shrink(matrix, 1.0, 1.02, norm_correction=True)
    torch.testing.assert_close(shrink(matrix, 1.0), expected, rtol=1e-6, atol=1e-8 * float(expected.norm()))


def test_spikes_of_one_size_are_all_found() -> None:
    """One vector of an eigenspace is all that a search from one start can see."""
    gram = torch.eye(200, dtype=torch.float64)
    gram[:3, :3] *= 5.0
    vectors = LANCZOS.leading_vectors(gram, 2.0)
    assert vectors.shape == (200, 3)
    torch.testing.assert_close(vectors @ vectors.T, torch.diag((gram.diagonal() > 2.0).double()))


def test_the_proof_says_nothing_of_what_is_not_finite() -> None:
    grams = torch.eye(4).repeat(4, 1, 1)
    grams[1, 2, 2] = math.nan
    grams[2, 1, 0] = grams[2, 0, 1] = math.inf
    grams[3, 1, 1] = 3.0
    assert LANCZOS.lies_below(grams, 2.0).tolist() == [True, False, False, False]


# -- what is returned as it is, and what is refused ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("matrix", "noise_std"),
    [
        (spiked((30, 40), [9.0]), 0.0),
        (torch.zeros(30, 40), 0.1),
        (torch.full((150, 160), math.nan), 0.1),
        (torch.full((150, 160), math.inf), 0.1),
        (torch.zeros(0, 3), 0.1),
        (torch.zeros(3, 0), 0.1),
    ],
    ids=["no noise", "zeros", "NaN", "Inf", "no rows", "no columns"],
)
def test_it_leaves_alone(matrix: Tensor, noise_std: float) -> None:
    assert shrink(matrix, noise_std) is matrix


def test_as_the_noise_goes_to_zero_the_result_goes_to_the_matrix() -> None:
    """So that none at all returns it as it is."""
    matrix = spiked((40, 60), [3.0])
    torch.testing.assert_close(shrink(matrix, 1e-9, norm_correction=False), matrix, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("unit", [1e-30, 1e-15, 1.0, 1e15, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_unit_does_not_matter(unit: float, dtype: torch.dtype) -> None:
    matrix = spiked((40, 60), [3.0, 2.0]).to(dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 1e-12
    torch.testing.assert_close(shrink(matrix * unit, unit) / unit, shrink(matrix, 1.0), rtol=tolerance, atol=tolerance)


def test_a_half_precision_matrix_is_shrunk_in_float32() -> None:
    matrix = spiked((40, 60), [3.0]).bfloat16()
    found = shrink(matrix, 1.0)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, shrink(matrix.float(), 1.0).bfloat16())


@pytest.mark.parametrize("shape", [(40, 60), (160, 200)], ids=str)
def test_an_autocast_around_it_changes_nothing(shape: tuple[int, int]) -> None:
    matrix = spiked(shape, [3.0, 1.3]).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = shrink(matrix, 1.0)
    assert torch.equal(found, shrink(matrix, 1.0))


def test_nothing_is_shrunk_to_nothing() -> None:
    assert shrink_all([], 1.0) == []


def test_the_matrix_itself_is_not_written_to() -> None:
    matrix = spiked((150, 160), [3.0])
    before = matrix.clone()
    assert shrink(matrix, 1.0).is_contiguous()
    torch.testing.assert_close(matrix, before, rtol=0.0, atol=0.0)


@pytest.mark.parametrize(("kappa", "message"), [(0.99, "kappa=0.99 is no threshold"), (math.inf, "is no threshold"), (math.nan, "is nan")])
def test_a_threshold_inside_the_noise_is_refused(kappa: float, message: str) -> None:
    with pytest.raises(lk.ConfigError, match=message):
        shrink(torch.zeros(3, 4), 1.0, kappa=kappa)


@pytest.mark.parametrize("noise_std", [-1.0, math.inf, math.nan])
def test_a_noise_level_that_is_none_is_refused(noise_std: float) -> None:
    with pytest.raises(lk.ConfigError, match=r"noise_std=.* is no standard deviation"):
        shrink(torch.zeros(3, 4), noise_std)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
def test_what_is_no_matrix_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(lk.ShapeError, match="Only a matrix has singular values"):
        shrink_all([torch.zeros(2, 2), torch.zeros(shape)], 1.0)
