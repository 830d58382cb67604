"""Renyi moments against high-precision integration and against dp-accounting; their conversion against both."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest

from lowkey.account.events import Mechanism
from lowkey.account.renyi import ORDERS, epsilon_from_renyi, renyi


def exact_divergence(rate: float, noise: float, order: float) -> float:
    with mpmath.workdps(40):
        q, s, a = mpmath.mpf(rate), mpmath.mpf(noise), mpmath.mpf(order)

        def integrand(z: mpmath.mpf) -> mpmath.mpf:
            return mpmath.npdf(z, 0, s) * ((1 - q) + q * mpmath.exp((2 * z - 1) / (2 * s * s))) ** a

        bend = s * s * mpmath.log(1 / q - 1) + mpmath.mpf(1) / 2
        corners = sorted([-20 * s, -5 * s, 0, 5 * s, bend, a - 5 * s, a, a + 5 * s, a + 20 * s])
        return float(mpmath.log(mpmath.quad(integrand, corners)) / (a - 1))


@pytest.mark.parametrize("order", [1.1, 2.0, 2.5, 7.0, 10.9, 40.0])
@pytest.mark.parametrize(("rate", "noise"), [(0.025, 2.0), (0.01, 0.5), (1e-4, 0.1), (0.5, 1.0), (0.9, 5.0), (0.99, 0.3), (1e-6, 1.0)])
def test_a_divergence_is_exact_and_never_below(rate: float, noise: float, order: float) -> None:
    exact = exact_divergence(rate, noise, order)
    ours = float(renyi(Mechanism(rate, noise), (order,))[0])
    assert exact * (1 - 1e-12) <= ours <= exact * (1 + 1e-8)


@pytest.mark.parametrize("order", [2, 3, 8])
def test_a_tiny_sampling_rate_does_not_cancel(order: int) -> None:
    # Source: the leading term, order / 2 * rate**2 * (exp(1 / noise**2) - 1).
    leading = order / 2 * 1e-18 * math.expm1(1.0)
    assert float(renyi(Mechanism(1e-9, 1.0), (float(order),))[0]) == pytest.approx(leading, rel=1e-6)


@pytest.mark.parametrize(("rate", "noise", "steps"), [(0.025, 2.0, 1200), (0.01, 0.6, 100), (1.0, 3.0, 7)])
@pytest.mark.parametrize("delta", [1e-5, 1e-9])
def test_the_conversion_is_that_of_dp_accounting(rate: float, noise: float, steps: int, delta: float) -> None:
    from dp_accounting.rdp import compute_epsilon

    divergences = steps * renyi(Mechanism(rate, noise), tuple(float(order) for order in ORDERS))
    expected, _ = compute_epsilon(ORDERS, divergences, delta)
    assert epsilon_from_renyi(divergences, delta) == pytest.approx(expected, rel=1e-9)


def test_a_truncated_draw_gets_no_amplification_here() -> None:
    capped = renyi(Mechanism(0.01, 2.0, 20, 1000), (2.0, 8.0))
    assert capped == pytest.approx([2.0 / (2 * 1.0), 8.0 / (2 * 1.0)])


def test_very_little_noise_gives_a_large_bound_and_no_warning() -> None:
    divergences = renyi(Mechanism(0.01, 1e-3), tuple(float(order) for order in ORDERS))
    assert epsilon_from_renyi(divergences, 1e-5) > 1e5
    assert not np.isnan(divergences).any()
