"""Is the law of the draws right: sizes, inclusion of each example, pairs, the cap?

Every test states alpha = 1e-6, runs from a fixed seed, and shows that the same check rejects a slightly spoiled sampler.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from lowkey.sample.generator import sampling_generator
from lowkey.sample.poisson import draw_indices

ALPHA = 1e-6
EXAMPLES, RATE, STEPS = 60, 0.2, 40_000
CAP = 14

Draws = NDArray[np.bool_]


def membership(sampling_rate: float = RATE, cap: int | None = None, steps: int = STEPS) -> Draws:
    """One row for each step, one column for each example."""
    generator = sampling_generator(17)
    rows = np.zeros((steps, EXAMPLES), dtype=bool)
    for row in rows:
        row[draw_indices(generator, EXAMPLES, sampling_rate, cap)] = True
    return rows


@pytest.fixture(scope="module")
def poisson() -> Draws:
    return membership()


@pytest.fixture(scope="module")
def truncated() -> Draws:
    return membership(cap=CAP)


def fit_p_value(observed: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    """Chi-squared test of counts, with classes below five expected merged at either end."""
    expected = probabilities * observed.sum()
    enough = np.flatnonzero(expected >= 5)
    first, last = enough[0], enough[-1]

    def merged(values: NDArray[np.float64]) -> NDArray[np.float64]:
        core = values[first : last + 1].astype(float).copy()
        core[0] += values[:first].sum()
        core[-1] += values[last + 1 :].sum()
        return core

    return float(stats.chisquare(merged(observed), merged(expected)).pvalue)


def size_p_value(rows: Draws) -> float:
    sizes = np.bincount(rows.sum(axis=1), minlength=EXAMPLES + 1)
    return fit_p_value(sizes, stats.binom.pmf(np.arange(EXAMPLES + 1), EXAMPLES, RATE))


def inclusion_p_value(rows: Draws, rate: float) -> float:
    """Each example's count is a sum of independent steps; the smallest p value, corrected for their number."""
    counts = rows.sum(axis=0)
    tails = np.minimum(stats.binom.cdf(counts, len(rows), rate), stats.binom.sf(counts - 1, len(rows), rate))
    return float(min(1.0, 2 * EXAMPLES * tails.min()))


def pair_p_value(rows: Draws) -> float:
    """Centred products of two examples' coins have mean 0 and standard deviation rate(1 - rate) under independence."""
    centred = rows - RATE
    z_scores = (centred.T @ centred)[np.triu_indices(EXAMPLES, 1)] / (RATE * (1 - RATE) * np.sqrt(len(rows)))
    return float(min(1.0, 2 * len(z_scores) * stats.norm.sf(np.abs(z_scores).max())))


def step_p_value(rows: Draws) -> float:
    """The same example in two consecutive steps."""
    centred = rows - RATE
    z_score = (centred[1:] * centred[:-1]).sum() / (RATE * (1 - RATE) * np.sqrt(centred[1:].size))
    return float(2 * stats.norm.sf(abs(z_score)))


def fixed_size(rows: Draws) -> Draws:
    """Spoil: as many examples as the mean says, at every step."""
    generator = np.random.default_rng(0)
    spoiled = np.zeros_like(rows)
    for row in spoiled:
        row[generator.choice(EXAMPLES, int(EXAMPLES * RATE), replace=False)] = True
    return spoiled


def test_batch_sizes_are_binomial(poisson: Draws) -> None:
    assert size_p_value(poisson) > ALPHA


def test_the_size_check_rejects_a_rate_two_percent_off() -> None:
    assert size_p_value(membership(RATE * 1.02)) < ALPHA


def test_the_size_check_rejects_fixed_sizes(poisson: Draws) -> None:
    assert size_p_value(fixed_size(poisson)) < ALPHA


def test_every_example_joins_at_the_sampling_rate(poisson: Draws) -> None:
    assert inclusion_p_value(poisson, RATE) > ALPHA


def test_the_inclusion_check_rejects_one_favoured_example(poisson: Draws) -> None:
    spoiled = poisson.copy()
    spoiled[:, 7] |= np.random.default_rng(1).random(STEPS) < 0.02
    assert inclusion_p_value(spoiled, RATE) < ALPHA


def test_pairs_of_examples_join_independently(poisson: Draws) -> None:
    assert pair_p_value(poisson) > ALPHA


def test_the_pair_check_rejects_two_examples_that_sometimes_join_together(poisson: Draws) -> None:
    spoiled = poisson.copy()
    together = np.random.default_rng(1).random(STEPS) < 0.05
    spoiled[together, 3] = spoiled[together, 4]
    assert pair_p_value(spoiled) < ALPHA


def test_steps_are_drawn_independently(poisson: Draws) -> None:
    assert step_p_value(poisson) > ALPHA


def test_the_step_check_rejects_a_draw_that_is_sometimes_repeated(poisson: Draws) -> None:
    spoiled = poisson.copy()
    spoiled[1::50] = spoiled[:-1:50]
    assert step_p_value(spoiled) < ALPHA


def capped_size_p_value(rows: Draws) -> float:
    probabilities = stats.binom.pmf(np.arange(CAP + 1), EXAMPLES, RATE)
    probabilities[CAP] = stats.binom.sf(CAP - 1, EXAMPLES, RATE)
    return fit_p_value(np.bincount(rows.sum(axis=1), minlength=CAP + 1), probabilities)


def capped_rate() -> float:
    """An example's chance to join: E[min(size, cap)] / n, from the truncation of a Poisson sample to a random subset."""
    sizes = np.arange(EXAMPLES + 1)
    return float((stats.binom.pmf(sizes, EXAMPLES, RATE) * np.minimum(sizes, CAP)).sum() / EXAMPLES)


def test_truncated_sizes_are_binomial_with_the_excess_at_the_cap(truncated: Draws) -> None:
    assert capped_size_p_value(truncated) > ALPHA


def test_truncation_favours_no_example(truncated: Draws) -> None:
    assert inclusion_p_value(truncated, capped_rate()) > ALPHA


def test_the_checks_reject_a_cap_that_redraws_instead_of_keeping_a_subset(poisson: Draws) -> None:
    assert capped_size_p_value(poisson[poisson.sum(axis=1) <= CAP]) < ALPHA


def test_the_checks_reject_a_cap_that_keeps_the_first_examples(poisson: Draws) -> None:
    spoiled = poisson & (poisson.cumsum(axis=1) <= CAP)
    assert capped_size_p_value(spoiled) > ALPHA
    assert inclusion_p_value(spoiled, capped_rate()) < ALPHA


@pytest.mark.parametrize("rate", [1e-6, 0.001, 0.05])
def test_large_datasets_are_drawn_uniformly(rate: float) -> None:
    # Both of numpy's subset algorithms, below and above 2 % of the population, over ten equal ranges.
    generator = sampling_generator(4)
    size = 1_000_000
    drawn = np.concatenate([draw_indices(generator, size, rate, None) for _ in range(max(1, round(200 / (rate * size))))])
    cells = np.bincount(drawn // (size // 10), minlength=10)
    assert stats.chisquare(cells).pvalue > ALPHA
    assert abs(len(drawn) - 200) < 5 * np.sqrt(200) or len(drawn) > 500


@pytest.mark.parametrize("rate", [0.001, 0.3, 1.0])
def test_a_draw_holds_distinct_indices_in_range(rate: float) -> None:
    indices = draw_indices(sampling_generator(1), 50_000, rate, None)
    assert (np.diff(indices) > 0).all()
    assert indices.dtype == np.int64
    assert 0 <= indices[0] <= indices[-1] < 50_000
