"""Epsilon from privacy loss distributions, with a grid fine enough for the answer it has to give."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lowkey.account.events import Counts, Mechanism, num_releases

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

_SMALLEST_DELTA = 1e-13
_COARSEST, _FINEST = 1e-2, 1e-7
_FIRST_BINS, _MOST_BINS = 60_000.0, 500_000.0
_MOST_HALVINGS = 8
_SETTLED = 2e-3


@dataclass(frozen=True)
class _Grid:
    """The spacing to start from, and the finest one that memory allows."""

    start: float
    finest: float


def epsilon_from_losses(counts: Counts, delta: float, scale: float, *, settle: bool = True) -> float:
    """Return epsilon at ``delta`` from the privacy loss distribution of the composition.

    Args:
        counts: What was released.
        delta: The failure probability.
        scale: A rough epsilon, which sets the grid; any positive value is safe.
        settle: Halve the grid until epsilon moves by under 0.2 % (its error is then a third of that); otherwise answer from the first grid.

    Returns:
        The epsilon, or infinity where the arithmetic proves none.

    Guarantee:
        An upper bound at every spacing, for adding or removing one example: dp-accounting rounds each loss pessimistically.
        The rounding of its Fourier transforms is charged to ``delta`` here.
    """
    if len(counts) == 1 and counts[0][0].sampling_rate == 1.0 and not counts[0][0].is_truncated:
        return _epsilon_gaussian(counts[0][0].noise_multiplier / math.sqrt(counts[0][1]), delta)
    # PRIVACY: a Fourier transform raised to the power T is wrong by up to T rounding units; that mass is not ours to use.
    usable_delta = delta - 1e-15 - 1e-16 * num_releases(counts)
    if delta < _SMALLEST_DELTA or usable_delta < delta / 2.0:
        return math.inf
    grid = _choose_grid(counts, scale)
    best = _epsilon_on_grid(counts, usable_delta, grid.start)
    spacing = grid.start / 2.0
    for _ in range(_MOST_HALVINGS if settle else 0):
        if spacing < grid.finest:
            break
        finer = _epsilon_on_grid(counts, usable_delta, spacing)
        has_settled = abs(best - finer) <= _SETTLED * finer
        best = min(best, finer)
        if has_settled:
            break
        spacing /= 2.0
    return best


def _epsilon_on_grid(counts: Counts, delta: float, spacing: float) -> float:
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = [_one(mechanism, spacing).self_compose(count) for mechanism, count in counts]
        whole = parts[0]
        for part in parts[1:]:
            whole = whole.compose(part)
        epsilon = float(whole.get_epsilon_for_delta(delta))
    return math.inf if math.isnan(epsilon) else max(0.0, epsilon)


def _one(mechanism: Mechanism, spacing: float) -> PrivacyLossDistribution:
    from dp_accounting.pld import privacy_loss_distribution as distribution  # heavy: only when an epsilon is asked for

    if mechanism.is_truncated:
        return distribution.from_truncated_subsampled_gaussian_mechanism(
            dataset_size=mechanism.num_examples,
            sampling_probability=mechanism.sampling_rate,
            truncated_batch_size=mechanism.max_batch_size,
            noise_multiplier=mechanism.noise_multiplier,
            value_discretization_interval=spacing,
        )
    return distribution.from_gaussian_mechanism(
        standard_deviation=mechanism.noise_multiplier,
        sampling_prob=mechanism.sampling_rate,
        value_discretization_interval=spacing,
    )


def _epsilon_gaussian(noise_multiplier: float, delta: float) -> float:
    """Return the exact epsilon of one Gaussian release, raised by the tolerance of its root finder."""
    from dp_accounting import get_epsilon_gaussian  # heavy: only when an epsilon is asked for

    with np.errstate(all="ignore"):
        return float(get_epsilon_gaussian(noise_multiplier, delta)) * (1.0 + 1e-9)


def _choose_grid(counts: Counts, scale: float) -> _Grid:
    """Pick the spacing from the answer's size and from the spread of one release's loss.

    A grid of spacing h adds a variance of about h**2/12 to each release's loss, so h must be small beside that loss's own spread:
    with many steps the spread is far below epsilon.
    """
    spread = min(_spread(mechanism) for mechanism, _ in counts)
    start = min(max(2e-4 * scale, 1e-6), _COARSEST, 0.08 * spread)
    largest_range = max(_range(mechanism) for mechanism, _ in counts)
    return _Grid(start=max(start, _FINEST, largest_range / _FIRST_BINS), finest=max(_FINEST, largest_range / _MOST_BINS))


def _spread(mechanism: Mechanism) -> float:
    """Return the standard deviation of one release's loss (to first order in the sampling rate)."""
    return mechanism.sampling_rate * math.sqrt(math.expm1(min(1.0 / mechanism.noise_multiplier**2, 50.0)))


def _range(mechanism: Mechanism) -> float:
    """Return the length of the interval that one release's loss occupies, but for mass exp(-50)."""
    noise = mechanism.noise_multiplier / (2.0 if mechanism.is_truncated else 1.0)
    rate = 1.0 if mechanism.is_truncated else mechanism.sampling_rate
    largest = 10.0 / noise + 0.5 / noise / noise
    return float(np.logaddexp(math.log(rate) + largest, math.log1p(-rate) if rate < 1.0 else -math.inf)) + min(
        largest, -math.log1p(-rate) if rate < 1.0 else math.inf
    )
