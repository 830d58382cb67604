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

from lowkey.release.box_muller import TILE
from lowkey.release.noise import CHUNK, NoiseSource, SeededNoise, SystemNoise
from lowkey.release.secure import SecureNoise

ALPHA = 1e-6
COUNT = 302_145
"""More than four chunks, so that threads take part, and a part of one."""
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


@pytest.mark.slow
@pytest.mark.parametrize("limit", [4.0, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tails_of_many_draws_are_as_heavy_as_a_normal_s(dtype: torch.dtype, limit: float) -> None:
    source, count = SystemNoise(), 1 << 22
    beyond = sum(int((source.normal(torch.empty(count, dtype=dtype), 1.0, step=i, index=0).abs() > limit).sum()) for i in range(10))
    expected = 2 * stats.norm.sf(limit) * 10 * count
    assert stats.poisson.ppf(ALPHA, expected) <= beyond <= stats.poisson.isf(ALPHA, expected)
    # A scale that is two percent too large is seen in the tails as well: there are half as many more beyond 5, and 38 % more beyond 4.
    spoiled = 2 * stats.norm.sf(limit / 1.02) * 10 * count
    assert limit == 5.0 or spoiled > stats.poisson.isf(ALPHA, expected)


def halves_of_tiles(noise: Tensor) -> tuple[Tensor, Tensor]:
    """The two numbers that share a radius, pair by pair."""
    tiles = noise[: len(noise) // TILE * TILE].view(-1, 2, TILE // 2)
    return tiles[:, 0].flatten(), tiles[:, 1].flatten()


def test_the_angle_of_a_pair_is_uniform_whatever_its_radius() -> None:
    first, second = halves_of_tiles(draw(SeededNoise(1), torch.float64))
    turns, radii = torch.atan2(second, first) / (2 * math.pi) + 0.5, torch.hypot(first, second)
    for part in (radii < radii.median(), radii >= radii.median()):
        assert stats.kstest(turns[part].numpy(), "uniform").pvalue > ALPHA
    assert stats.kstest((-(radii**2) / (2 * STD**2)).exp().numpy(), "uniform").pvalue > ALPHA


def test_the_pairs_check_rejects_a_radius_that_also_makes_the_angle() -> None:
    uniform = torch.from_numpy(np.random.default_rng(0).random(COUNT))
    radii = STD * (-2 * uniform.log()).sqrt()
    left, right = radii * (2 * math.pi * uniform).cos(), radii * (2 * math.pi * uniform).sin()
    assert max(map(abs, cross_z_scores(left, right))) > Z_LIMIT


def neighbouring_draws(make: Callable[[], NoiseSource]) -> dict[str, tuple[Tensor, Tensor]]:
    source = make()
    noise = draw(source)
    return {
        "steps": (noise, draw(source, step=2)),
        "indices": (noise, draw(source, index=1)),
        "chunks": (noise[:CHUNK], noise[CHUNK : 2 * CHUNK]),
        "neighbours": (noise[:-1], noise[1:]),
        "pairs": halves_of_tiles(noise),
        "halves of a chunk": (noise[: CHUNK // 2], noise[CHUNK // 2 : CHUNK]),
        "swapped names": (draw(source, step=3, index=4), draw(source, step=4, index=3)),
    }


PAIRS = ("steps", "indices", "chunks", "neighbours", "pairs", "halves of a chunk", "swapped names")


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
