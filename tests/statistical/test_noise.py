"""Is the noise right: its scale, its shape, and its independence between draws?

Every test states its false alarm rate, alpha = 1e-6, and runs with a fixed stand-in for the
operating system's entropy, so a pass stays a pass.
Every test also shows that it would notice: the same check must reject a slightly spoiled copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from lowkey.release.noise import CHUNK, NoiseSource, SeededNoise, SystemNoise
from lowkey.release.secure import SecureNoise

ALPHA = 1e-6
COUNT = 2 * CHUNK + 40_001
STD = 1.7
Z_LIMIT = float(stats.norm.isf(ALPHA / 2))

SOURCES: list[Callable[[], NoiseSource]] = [SystemNoise, SecureNoise, lambda: SeededNoise(11)]
source_and_dtype = pytest.mark.parametrize(
    ("make", "dtype"),
    [(make, dtype) for make in SOURCES for dtype in (torch.float32, torch.float64)],
    ids=[f"{name}-{bits}" for name in ("system", "secure", "seeded") for bits in (32, 64)],
)


@pytest.fixture(autouse=True)
def fixed_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.urandom", lambda count: bytes(range(count)))


def scale_p_value(noise: Tensor) -> float:
    """Two-sided chi-squared test of `sum(noise²) / STD²` against `noise.numel()` degrees of freedom."""
    assert noise.numel() >= 200_000
    statistic = float(noise.double().square().sum()) / STD**2
    return 2 * min(stats.chi2.cdf(statistic, noise.numel()), stats.chi2.sf(statistic, noise.numel()))


def shape_p_value(noise: Tensor) -> float:
    return float(stats.kstest(noise.double().numpy() / STD, "norm").pvalue)


def cross_z_scores(left: Tensor, right: Tensor) -> tuple[float, float]:
    """Cross-moments of the values and of their squares, each standard normal under independence."""
    x, y = left.double() / STD, right.double() / STD
    root = math.sqrt(len(x))
    return float((x * y).sum()) / root, float(((x**2 - 1) * (y**2 - 1)).sum()) / (2 * root)


def draw(source: NoiseSource, dtype: torch.dtype = torch.float32, *, step: int = 1, index: int = 0) -> Tensor:
    return source.normal(torch.empty(COUNT, dtype=dtype), STD, step=step, index=index)


@source_and_dtype
def test_noise_has_the_asked_standard_deviation(make: Callable[[], NoiseSource], dtype: torch.dtype) -> None:
    assert scale_p_value(draw(make(), dtype)) > ALPHA


@source_and_dtype
def test_the_scale_check_rejects_noise_that_is_two_percent_too_large(make: Callable[[], NoiseSource], dtype: torch.dtype) -> None:
    assert scale_p_value(draw(make(), dtype) * 1.02) < ALPHA


@source_and_dtype
def test_noise_is_normal_in_shape(make: Callable[[], NoiseSource], dtype: torch.dtype) -> None:
    assert shape_p_value(draw(make(), dtype)) > ALPHA


def test_the_shape_check_rejects_a_student_t_of_the_same_scale() -> None:
    heavy = np.random.default_rng(0).standard_t(8, COUNT) * math.sqrt(6 / 8) * STD
    assert shape_p_value(torch.from_numpy(heavy)) < ALPHA


def test_tails_reach_as_far_as_a_normal_does() -> None:
    beyond = int((draw(SystemNoise()).abs() > 4 * STD).sum())
    expected = 2 * stats.norm.sf(4) * COUNT
    assert stats.poisson.ppf(ALPHA, expected) <= beyond <= stats.poisson.isf(ALPHA, expected)


def neighbouring_draws(make: Callable[[], NoiseSource]) -> dict[str, tuple[Tensor, Tensor]]:
    source = make()
    noise = draw(source)
    return {
        "steps": (noise, draw(source, step=2)),
        "indices": (noise, draw(source, index=1)),
        "chunks": (noise[:CHUNK], noise[CHUNK : 2 * CHUNK]),
        "neighbours": (noise[:-1], noise[1:]),
        "halves of a chunk": (noise[: CHUNK // 2], noise[CHUNK // 2 : CHUNK]),
        "swapped names": (draw(source, step=3, index=4), draw(source, step=4, index=3)),
    }


PAIRS = ("steps", "indices", "chunks", "neighbours", "halves of a chunk", "swapped names")


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("make", SOURCES, ids=("system", "secure", "seeded"))
def test_draws_with_different_names_are_independent(make: Callable[[], NoiseSource], pair: str) -> None:
    assert max(map(abs, cross_z_scores(*neighbouring_draws(make)[pair]))) < Z_LIMIT


def test_the_independence_check_rejects_a_two_percent_admixture() -> None:
    left, right = draw(SeededNoise(1)), draw(SeededNoise(2))
    assert abs(cross_z_scores(left, right + 0.02 * left)[0]) > Z_LIMIT


def test_the_independence_check_rejects_a_shared_magnitude_with_free_signs() -> None:
    noise = draw(SeededNoise(1))
    signs = torch.sign(draw(SeededNoise(2)))
    assert abs(cross_z_scores(noise, noise * signs)[1]) > Z_LIMIT


def test_seeds_that_agree_in_their_low_32_bits_give_independent_noise() -> None:
    low, high = draw(SeededNoise(5)), draw(SeededNoise(5 + 2**32))
    assert max(map(abs, cross_z_scores(low, high))) < Z_LIMIT


def test_repeating_a_step_gives_independent_noise() -> None:
    source = SystemNoise()
    assert max(map(abs, cross_z_scores(draw(source), draw(source)))) < Z_LIMIT
