r"""What it costs to try many settings and keep the best one, when the number of trials is random.

Trying ``k`` settings and publishing the best is one mechanism; its Renyi divergence is bounded by that of a single trial plus a price for
the choice (Papernot and Steinke 2022, arXiv:2110.03620, Theorems 2 and 6). The number of trials must be drawn from the stated
distribution before the first trial, every trial must be run, and only the best may be looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum
from typing import assert_never, cast

import numpy as np

from lowkey.account.epsilon import Accountant, Bound
from lowkey.account.events import Event, merge
from lowkey.account.renyi import ORDERS, Vector, compose_renyi, delta_from_renyi, epsilon_from_renyi
from lowkey.checks import require_delta, require_number
from lowkey.errors import ConfigError


class TrialCount(Enum):
    """How the number of trials is drawn."""

    GEOMETRIC = "geometric"
    """At least 1; often far more or fewer than the mean."""
    LOGARITHMIC = "logarithmic"
    """At least 1; cheapest for a given mean, because it is 1 so often."""
    POISSON = "Poisson"
    """Concentrated around its mean, and 0 with probability exp(-mean)."""


def compose_trials(events: Iterable[Event], delta: float, *, mean_trials: float, count: TrialCount = TrialCount.GEOMETRIC) -> Bound:
    """Return the bound on searching with a random number of trials and publishing the best.

    Args:
        events: The releases of one trial; every trial must cost at most this.
        delta: The failure probability of the whole search.
        mean_trials: Mean number of trials, at least 1.
        count: How the number is drawn.

    Returns:
        The bound of the Renyi accountant, the only one that covers a choice among trials.

    Raises:
        ConfigError: If ``mean_trials`` is below 1, or ``delta`` is not in (0, 1).

    Guarantee:
        The published trial, its setting and its score are ``(epsilon, delta)``-DP together, for adding or removing one example.

    Assumes:
        The number of trials came from `draw_num_trials` or the same distribution, each trial drew its setting independently of the data,
        and scoring a trial is charged to it or used public data only.
    """
    require_delta(delta)
    _check_mean(mean_trials)
    counts = merge(events)
    if any(mechanism.noise_multiplier == 0.0 for mechanism, _ in counts):
        return Bound(epsilon=math.inf, delta=delta, accountant=Accountant.RDP)
    searched = _search(compose_renyi(counts), mean_trials, count) if counts else np.zeros(len(ORDERS))
    return Bound(epsilon=epsilon_from_renyi(searched, delta), delta=delta, accountant=Accountant.RDP)


def draw_num_trials(generator: np.random.Generator, *, mean_trials: float, count: TrialCount = TrialCount.GEOMETRIC) -> int:
    """Draw how many trials to run; draw once, and run them all.

    Raises:
        ConfigError: If ``mean_trials`` is below 1.

    Guarantee:
        The distribution is the one that `compose_trials` charges for.
    """
    _check_mean(mean_trials)
    match count:
        case TrialCount.GEOMETRIC:
            return int(generator.geometric(1.0 / mean_trials))
        case TrialCount.LOGARITHMIC:
            stop = _stop_probability(mean_trials, count)
            return 1 if stop >= 1.0 else int(generator.logseries(1.0 - stop))
        case TrialCount.POISSON:
            return int(generator.poisson(mean_trials))
        case _:
            assert_never(count)


def _search(one: Vector, mean_trials: float, count: TrialCount) -> Vector:
    """Return the divergence of the search at each order."""
    entropy = math.log(mean_trials) / (ORDERS - 1.0)
    if count is TrialCount.POISSON:
        deltas = np.array([delta_from_renyi(one, math.log1p(1.0 / (order - 1.0))) for order in ORDERS])
        return one + mean_trials * deltas + entropy
    stop = _stop_probability(mean_trials, count)
    shape = 1.0 if count is TrialCount.GEOMETRIC else 0.0
    choice = (1.0 + shape) * float(np.min((1.0 - 1.0 / ORDERS) * one - math.log(stop) / ORDERS))
    searched = one + entropy + choice
    # A divergence never falls as its order grows, so any larger order bounds a smaller one.
    return np.minimum.accumulate(searched[::-1])[::-1]


def _stop_probability(mean_trials: float, count: TrialCount) -> float:
    """Return the parameter gamma of the distribution with this mean."""
    if count is TrialCount.GEOMETRIC or mean_trials == 1.0:
        return 1.0 / mean_trials
    from scipy.optimize import brentq  # heavy: only when a search is priced

    log_stop = cast(float, brentq(lambda x: (math.expm1(-x) / -x) - mean_trials, -700.0, -1e-12))
    return math.exp(log_stop) * (1.0 - 1e-9)


def _check_mean(mean_trials: float) -> None:
    if not 1.0 <= require_number("mean_trials", mean_trials) < math.inf:
        raise ConfigError(
            f"mean_trials={mean_trials} is no number of trials. It must be finite and at least 1. Pass the mean you can afford."
        )
