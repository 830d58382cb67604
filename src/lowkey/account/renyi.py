r"""Renyi divergence of the Poisson-sampled Gaussian, without cancellation, and its conversion to epsilon.

With ``w(z) = 1 - q + q exp((2z - 1) / (2 s^2))`` and ``z ~ N(0, s^2)``, the divergence of order ``a`` is ``log(A) / (a - 1)``
with ``A = E[w^a]`` (Mironov, Talwar and Zhang 2019, arXiv:1908.10530, section 3.3). Because ``E[w] = 1``,

    A - 1 = E[w^a - 1 - a (w - 1)]                                                            any order
          = sum over k >= 2 of  C(a, k) q^k (1 - q)^(a - k) (exp((k^2 - k) / (2 s^2)) - 1)     whole orders

and every term on the right is non-negative. Summing those keeps full relative precision at sampling rates of 1e-6 and below,
where ``log(A)`` itself drowns in rounding and an epsilon of 0 could come out.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lowkey.account.events import Counts, Mechanism

Vector = npt.NDArray[np.float64]

FRACTIONAL_ORDERS = tuple(1.0 + tenth / 10.0 for tenth in range(1, 100) if tenth % 10)
WHOLE_ORDERS = (*range(2, 64), 128, 256, 512, 1024, 2048, 4096, 8192)
ORDERS: Vector = np.array(sorted((*FRACTIONAL_ORDERS, *WHOLE_ORDERS)), dtype=np.float64)
"""The orders of dp-accounting, and three larger ones for very small epsilon."""

_SMALLEST_FRACTIONAL_NOISE = 0.05
_ROUNDING = 1e-9


def compose_renyi(counts: Counts, orders: Vector = ORDERS) -> Vector:
    """Return the Renyi divergence of the whole composition at each order.

    Guarantee:
        An upper bound for adding or removing one example. Rounding is covered by raising each divergence by one part in 1e9.
    """
    total = np.zeros(len(orders))
    for mechanism, count in counts:
        total += count * renyi(mechanism, tuple(float(order) for order in orders))
    return total


@lru_cache(maxsize=512)
def renyi(mechanism: Mechanism, orders: tuple[float, ...]) -> Vector:
    """Return the Renyi divergence of one release at each order."""
    rate, noise = mechanism.sampling_rate, mechanism.noise_multiplier
    if mechanism.is_truncated:
        # PRIVACY: a truncated draw can swap one example for another, which moves the sum by 2 clip norms; claim no amplification.
        rate, noise = 1.0, noise / 2.0
    if rate == 1.0:
        return np.array(orders) / noise / noise / 2.0
    result = np.array([_log_moment(rate, noise, order) / (order - 1.0) for order in orders]) * (1.0 + _ROUNDING)
    result.setflags(write=False)
    return result


def epsilon_from_renyi(divergences: Vector, delta: float, orders: Vector = ORDERS) -> float:
    """Return the smallest epsilon that some order proves at ``delta``.

    Guarantee:
        An upper bound: each order's epsilon is one (Canonne, Kamath and Steinke 2020, arXiv:2004.00010, Prop. 12), so their minimum is.
    """
    with np.errstate(all="ignore"):
        per_order = divergences + np.log1p(-1.0 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1.0)
        # A total-variation distance below delta needs no epsilon at all; the divergence of any order above 1 bounds it.
        is_free = -np.expm1(-divergences) < delta * delta
    return max(0.0, float(np.min(np.where(is_free, 0.0, per_order))))


def delta_from_renyi(divergences: Vector, epsilon: float, orders: Vector = ORDERS) -> float:
    """Return the smallest delta that some order proves at ``epsilon`` (the same bound, read the other way)."""
    with np.errstate(all="ignore"):
        by_order = (orders - 1.0) * (divergences - epsilon + np.log1p(-1.0 / orders)) - np.log(orders)
        by_distance = 0.5 * np.log(-np.expm1(-divergences))
    return min(1.0, math.exp(min(0.0, float(np.min(by_order)), float(np.min(by_distance)))))


def _log_moment(rate: float, noise: float, order: float) -> float:
    if order.is_integer():
        excess = _log_excess_whole(rate, noise, int(order))
    elif noise >= _SMALLEST_FRACTIONAL_NOISE:
        excess = _log_excess_fractional(rate, noise, order)
    else:
        return math.inf  # leaving an order out never lowers the bound
    return float(np.logaddexp(0.0, excess))


def _log_excess_whole(rate: float, noise: float, order: int) -> float:
    """Return ``log(A - 1)`` from the finite sum over ``k``."""
    k = np.arange(2, order + 1, dtype=np.float64)
    log_factorials = _log_factorials(order)
    log_choose = log_factorials[order] - log_factorials[2:] - log_factorials[order - 2 :: -1]
    log_weights = log_choose + k * math.log(rate) + (order - k) * math.log1p(-rate)
    return float(np.logaddexp.reduce(log_weights + _log_expm1((k * k - k) / noise / noise / 2.0)))


def _log_excess_fractional(rate: float, noise: float, order: float) -> float:
    """Return ``log(A - 1)`` from the integral over ``z``.

    The integrand is analytic within ``pi * noise**2`` of the real axis, so the trapezoid rule with this step errs by under 1e-15.
    """
    step = min(noise / 20.0, noise * noise / 2.0)
    z = np.arange(-14.0 * noise, order + 14.0 * noise, step)
    loss = (2.0 * z - 1.0) / noise / noise / 2.0
    # NUMERICS: log1p keeps a tiny rate exact near 0; logaddexp does not overflow far out.
    near = np.log1p(rate * np.expm1(np.minimum(loss, 50.0)))
    log_ratio = np.where(loss > 50.0, np.logaddexp(math.log1p(-rate), math.log(rate) + loss), near)
    log_density = -0.5 * (z / noise) ** 2 - math.log(noise * math.sqrt(2.0 * math.pi))
    return float(np.logaddexp.reduce(_log_convex_gap(log_ratio, order) + log_density)) + math.log(step)


def _log_convex_gap(log_ratio: Vector, order: float) -> Vector:
    """Return ``log(w^a - 1 - a (w - 1))`` for ``w = exp(log_ratio)``."""
    y = log_ratio
    with np.errstate(all="ignore"):
        # NUMERICS: three ranges; the difference cancels near 0 and overflows far out.
        series = sum((order**k - order) / math.factorial(k) * y**k for k in range(2, 9))
        middle = np.expm1(np.minimum(order * y, 40.0)) - order * np.expm1(np.minimum(y, 40.0))
        far = order * y + np.log1p(-order * np.exp((1.0 - order) * y) + (order - 1.0) * np.exp(-order * y))
        near_or_middle = np.log(np.where(np.abs(order * y) < 1e-2, series, middle))
    return np.where(order * y > 30.0, far, near_or_middle)


@lru_cache(maxsize=128)
def _log_factorials(largest: int) -> Vector:
    return np.array([math.lgamma(k + 1.0) for k in range(largest + 1)])


def _log_expm1(x: Vector) -> Vector:
    return np.where(x > 1.0, x + np.log1p(-np.exp(-np.maximum(x, 1.0))), np.log(np.expm1(np.minimum(x, 1.0))))
