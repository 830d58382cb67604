r"""The privacy figures that papers printed, for reproducing their tables; never a bound to rely on.

The moments conversion of 2017 is valid but loose. The Gaussian-DP central limit theorem is an approximation that reports too little:
by 1 to 28 per cent in ordinary settings, and by a factor of 20 at small sampling rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import cast

import numpy as np

from lowkey.account.events import Mechanism, from_history, merge
from lowkey.account.renyi import compose_renyi
from lowkey.checks import require_delta


class Formula(Enum):
    """Which paper's way of computing an epsilon."""

    MOMENTS_2017 = "moments accountant of 2017"
    GAUSSIAN_LIMIT = "Gaussian-DP central limit"


@dataclass(frozen=True, kw_only=True)
class PublishedEpsilon:
    """An epsilon as a paper computed it.

    Fields:
        value: The number that the paper prints.
        delta: The failure probability it was computed for.
        formula: How.

    Guarantee:
        None. Use `lowkey.account.epsilon` for a bound.
    """

    value: float
    delta: float
    formula: Formula

    def __str__(self) -> str:
        return f"{self.value:.4g} at δ = {self.delta:g} ({self.formula.value}; to reproduce a table, not a bound)"


MOMENTS_ORDERS = np.array([1.0 + tenth / 10.0 for tenth in range(1, 100)] + [float(order) for order in range(11, 256)])


def moments_epsilon_2017(history: Iterable[tuple[float, float, int]], delta: float) -> PublishedEpsilon:
    """Return ``min over orders of RDP + log(1/delta) / (order - 1)``, as `zhou2021pdp` and others report it.

    Guarantee:
        None as an account of a run: it reproduces tables, and is looser than `lowkey.account.epsilon`.
    """
    divergences = compose_renyi(merge(from_history(history)), MOMENTS_ORDERS)
    value = float(np.min(divergences - math.log(require_delta(delta)) / (MOMENTS_ORDERS - 1.0)))
    return PublishedEpsilon(value=value, delta=delta, formula=Formula.MOMENTS_2017)


def gaussian_limit_epsilon(history: Iterable[tuple[float, float, int]], delta: float) -> PublishedEpsilon:
    """Return the epsilon of the Gaussian-DP limit, ``mu**2 = sum of steps * rate**2 * (exp(1/noise**2) - 1)``.

    Guarantee:
        None: the limit is below the truth, sometimes far.
    """
    require_delta(delta)
    counts = merge(from_history(history))
    mean = math.sqrt(sum(count * _limit_variance(mechanism) for mechanism, count in counts))
    return PublishedEpsilon(value=_gaussian_dp_epsilon(mean, delta), delta=delta, formula=Formula.GAUSSIAN_LIMIT)


def _limit_variance(mechanism: Mechanism) -> float:
    if mechanism.noise_multiplier == 0.0:
        return math.inf
    inverse = 1.0 / mechanism.noise_multiplier**2
    return inverse if mechanism.sampling_rate == 1.0 else mechanism.sampling_rate**2 * math.expm1(min(inverse, 700.0))


def _gaussian_dp_epsilon(mean: float, delta: float) -> float:
    if mean == 0.0 or math.isinf(mean):
        return mean

    from scipy.optimize import brentq  # heavy: only when a table is reproduced
    from scipy.special import log_ndtr

    def excess(epsilon: float) -> float:
        first = math.exp(float(log_ndtr(mean / 2.0 - epsilon / mean)))
        return first - math.exp(epsilon + float(log_ndtr(-mean / 2.0 - epsilon / mean))) - delta

    return 0.0 if excess(0.0) <= 0.0 else cast(float, brentq(excess, 0.0, mean * mean / 2.0 + 40.0 * mean, xtol=1e-12))
