"""The noise that a budget asks for: enough, and not much more than enough."""

from __future__ import annotations

import math
import sys
import time

import pytest

from lowkey.account import Plan, Poisson, Sampling, TruncatedPoisson, Unsampled, calibrate
from lowkey.account.calibrate import _solve, _verify
from lowkey.errors import ConfigError


# Source: dp-accounting 0.6, PLD, q = 1/16, 1000 steps, delta 1e-5; the last two by the closed form of the Gaussian.
@pytest.mark.parametrize(
    ("epsilon", "num_examples", "batch", "steps", "expected"),
    [(6.0, 16_000, 1000, 1000, 1.69493), (2.0, 16_000, 1000, 1000, 4.05029), (4.37718, 100, 100, 1, 1.0), (4.37718, 100, 100, 25, 5.0)],
)
def test_the_noise_equals_the_golden_value(epsilon: float, num_examples: int, batch: int, steps: int, expected: float) -> None:
    plan = calibrate(epsilon=epsilon, delta=1e-5, num_examples=num_examples, expected_batch_size=batch, num_steps=steps)
    assert plan.noise_multiplier == pytest.approx(expected, rel=2e-4)
    assert plan.epsilon <= epsilon


@pytest.mark.parametrize("sampling", [Poisson(), TruncatedPoisson(max_batch_size=330), Unsampled()], ids=str)
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
def test_the_budget_is_met_and_nearly_used(epsilon: float, sampling: Sampling) -> None:
    plan = calibrate(epsilon=epsilon, delta=1e-5, num_examples=10_000, expected_batch_size=250, num_steps=50, sampling=sampling)
    assert epsilon * (1 - 2e-3) <= plan.epsilon <= epsilon
    assert plan.sampling == sampling


@pytest.mark.parametrize(
    ("epsilon", "delta", "num_examples", "batch", "steps"),
    [
        (100.0, 1e-5, 60_000, 256, 3515),
        (2.0, 1e-5, 1000, 1000, 100),
        (1.0, 1e-14, 1_000_000, 1000, 1000),
        (0.001, 1e-6, 1_000_000, 1000, 10),
        pytest.param(1.0, 1e-6, 1_000_000, 1000, 1_000_000, marks=pytest.mark.slow),
        pytest.param(1.0, 1e-7, 1_000_000, 1, 1_000_000, marks=pytest.mark.slow),
        pytest.param(1000.0, 1e-5, 10_000, 100, 100, marks=pytest.mark.slow),
    ],
)
def test_extreme_settings_are_met_too(epsilon: float, delta: float, num_examples: int, batch: int, steps: int) -> None:
    plan = calibrate(epsilon=epsilon, delta=delta, num_examples=num_examples, expected_batch_size=batch, num_steps=steps)
    assert epsilon * 0.98 <= plan.epsilon <= epsilon


def test_an_ordinary_calibration_takes_under_three_seconds() -> None:
    started = time.process_time()
    calibrate(epsilon=7.5, delta=1e-5, num_examples=50_000, expected_batch_size=1000, num_steps=3000)
    assert time.process_time() - started < 3.0


def test_the_noise_has_six_digits() -> None:
    plan = calibrate(epsilon=2.0, delta=1e-5, num_examples=1000, expected_batch_size=1000, num_steps=100)
    assert plan.noise_multiplier == float(f"{plan.noise_multiplier:.5e}")


@pytest.mark.parametrize(
    ("epsilon", "hint"), [(0.0, "positive"), (-1.0, "positive"), (math.inf, "nonprivate"), (math.nan, "nan"), (1e-12, "cannot be met")]
)
def test_a_budget_that_nothing_meets_is_refused(epsilon: float, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        calibrate(epsilon=epsilon, delta=1e-14, num_examples=1000, expected_batch_size=1000, num_steps=100)


FACTS = Plan(noise_multiplier=0.0, delta=1e-5, num_examples=100, expected_batch_size=100, num_steps=1)


def test_noise_that_falls_short_of_its_budget_is_raised_until_it_is_met() -> None:
    # Source: closed form of the Gaussian; noise 1 has epsilon 4.37718, and a little less noise does not.
    raised = _verify(FACTS, 0.99995, 4.37718)
    assert raised.epsilon <= 4.37718
    assert 1.0 <= raised.noise_multiplier < 1.0 + 3e-5


def test_noise_that_stays_short_of_its_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be met"):
        _verify(FACTS, 0.5, 4.37718)


def test_a_search_that_is_cut_short_errs_on_the_side_of_more_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    # The package exports a function of the module's name.
    monkeypatch.setattr(sys.modules["lowkey.account.calibrate"], "_MOST_TRIES", 1)
    assert _solve(lambda noise: -math.log(noise), 0.0, 50.0) >= 1.0


def test_the_facts_are_checked_before_anything_is_solved() -> None:
    with pytest.raises(ConfigError, match="swap epsilon and delta"):
        calibrate(epsilon=1e-5, delta=8.0, num_examples=1000, expected_batch_size=100, num_steps=100)
