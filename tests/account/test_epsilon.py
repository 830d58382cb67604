"""Epsilon against numbers from elsewhere: dp-accounting at fixed fine grids, prv-accountant, and closed forms."""

from __future__ import annotations

import math
import warnings

import pytest

from lowkey.account import Accountant, Event, Poisson, TruncatedPoisson, Unsampled, compose, epsilon, renyi_epsilon
from lowkey.account.events import merge
from lowkey.account.losses import epsilon_from_losses
from lowkey.errors import ConfigError


def event(rate: float, noise: float, steps: int, **facts: object) -> Event:
    return Event(sampling_rate=rate, noise_multiplier=noise, num_steps=steps, **facts)  # pyright: ignore[reportArgumentType]


# Source: dp-accounting 0.6, PLD, Poisson sampling, delta 1e-5; the Gaussian rows also follow from Balle and Wang's closed form.
@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([(1.0, 0.5, 1)], 9.99726),
        ([(1.0, 1.0, 1)], 4.37718),
        ([(1.0, 2.0, 1)], 1.99309),
        ([(1.0, 5.0, 1)], 0.725522),
        ([(1.0, 10.0, 1)], 0.340669),
        ([(0.025, 2.0, 1200)], 1.8773),
        ([(0.025, 4.0, 1200)], 0.8158),
        ([(0.025, 6.0, 1200)], 0.5165),
        ([(0.025, 8.0, 1200)], 0.3754),
        ([(0.025, 10.0, 1200)], 0.2936),
        ([(0.025, 14.0, 1200)], 0.2029),
        ([(0.025, 18.0, 1200)], 0.1541),
        ([(256 / 60000, 1.1, 3515)], 1.13374),
        ([(0.01, 1.5, 500), (0.02, 2.5, 500)], 0.96212),
    ],
)
def test_epsilon_equals_the_golden_value(history: list[tuple[float, float, int]], expected: float) -> None:
    assert epsilon(history, delta=1e-5) == pytest.approx(expected, rel=1e-3)


# Source: dp-accounting 0.6, RdpAccountant with its default orders, delta 1e-5.
@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([(0.025, 2.0, 1200)], 2.0516),
        ([(0.025, 4.0, 1200)], 0.8945),
        ([(0.025, 6.0, 1200)], 0.5678),
        ([(0.025, 8.0, 1200)], 0.4136),
        ([(0.025, 10.0, 1200)], 0.3240),
        ([(0.025, 14.0, 1200)], 0.2246),
        ([(0.025, 18.0, 1200)], 0.1762),
        ([(256 / 60000, 1.1, 3515)], 1.28114),
        ([(0.01, 1.5, 500), (0.02, 2.5, 500)], 1.05859),
    ],
)
def test_renyi_epsilon_equals_the_golden_value(history: list[tuple[float, float, int]], expected: float) -> None:
    assert renyi_epsilon([event(*entry) for entry in history], 1e-5) == pytest.approx(expected, rel=1e-3)


# Source: dp-accounting 0.6, TruncatedSubsampledGaussianDpEvent, n = 10,000, q = .025, noise 2, 1200 steps.
@pytest.mark.parametrize(("cap", "expected"), [(250, 5.955), (300, 1.896), (330, 1.8773), (10_000, 1.8773)])
def test_truncated_poisson_costs_what_the_truncation_costs(cap: int, expected: float) -> None:
    truncated = event(0.025, 2.0, 1200, sampling=TruncatedPoisson(max_batch_size=cap), num_examples=10_000)
    assert compose([truncated], 1e-5).epsilon == pytest.approx(expected, rel=1e-3)


def test_unsampled_batches_get_no_amplification() -> None:
    # Source: one Gaussian release with noise 2 / sqrt(30 epochs).
    shuffled = event(0.025, 2.0, 1200, sampling=Unsampled(), num_examples=10_000)
    assert compose([shuffled], 1e-5).epsilon == pytest.approx(14.83, rel=1e-3)
    assert compose([shuffled], 1e-5).epsilon == pytest.approx(epsilon([(1.0, 2.0, 30)], 1e-5), rel=1e-12)


def test_two_unsampled_runs_are_rounded_up_to_epochs_separately() -> None:
    half_epoch = event(0.1, 2.0, 5, sampling=Unsampled(), num_examples=100)
    assert compose([half_epoch, half_epoch], 1e-5).epsilon == pytest.approx(epsilon([(1.0, 2.0, 2)], 1e-5), rel=1e-12)


@pytest.mark.parametrize(("rate", "noise", "steps", "delta"), [(0.01, 1.0, 1000, 1e-5), (0.1, 3.0, 300, 1e-6), (0.004, 0.7, 500, 1e-5)])
def test_epsilon_is_above_an_independent_lower_estimate(rate: float, noise: float, steps: int, delta: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from prv_accountant import PoissonSubsampledGaussianMechanism, PRVAccountant

        mechanism = PoissonSubsampledGaussianMechanism(sampling_probability=rate, noise_multiplier=noise)
        oracle = PRVAccountant(prvs=[mechanism], max_self_compositions=[steps], eps_error=0.005, delta_error=delta * 1e-3)
        low, _, high = oracle.compute_epsilon(delta, [steps])
    assert low <= epsilon([(rate, noise, steps)], delta) <= high


@pytest.mark.parametrize(
    ("rate", "noise", "steps", "delta", "spacing"),
    [
        (0.01, 0.8, 2000, 1e-6, 5e-5),
        (0.2, 5.0, 50, 1e-5, 5e-5),
        (1e-3, 0.6, 5000, 1e-5, 5e-5),
        (0.5, 0.6, 30, 1e-5, 5e-4),
        (1e-3, 10.0, 10, 1e-6, 1e-7),
        (1e-3, 1.0, 3000, 1e-6, 1e-5),
    ],
)
def test_epsilon_matches_a_fine_loss_distribution(rate: float, noise: float, steps: int, delta: float, spacing: float) -> None:
    from dp_accounting.pld import privacy_loss_distribution

    one = privacy_loss_distribution.from_gaussian_mechanism(noise, sampling_prob=rate, value_discretization_interval=spacing)
    fine = one.self_compose(steps).get_epsilon_for_delta(delta)
    assert fine * (1 - 1e-5) <= epsilon([(rate, noise, steps)], delta) <= fine * (1 + 1e-3)


@pytest.mark.parametrize(
    ("steps", "delta"),
    [
        (1000, 1e-5),
        (1000, 1e-12),
        (100_000, 1e-10),
        (100_000, 1e-12),
        pytest.param(1_000_000, 1e-9, marks=pytest.mark.slow),
        (1_000_000, 1e-14),
    ],
)
def test_rounding_in_long_compositions_never_lowers_epsilon(steps: int, delta: float) -> None:
    # Source: closed form of the Gaussian. A loss distribution without a rounding allowance is up to 8 % below it here.
    from dp_accounting import get_epsilon_gaussian

    almost_whole = 1.0 - 1e-9  # sampled, so that the closed form is not taken
    exact = get_epsilon_gaussian(1.0, delta)
    assert compose([event(almost_whole, math.sqrt(steps), steps)], delta).epsilon >= exact * (1 - 1e-6)


def test_a_grid_is_halved_until_memory_ends_where_epsilon_does_not_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = merge([event(0.01, 1.0, 1000)])
    settled = epsilon_from_losses(counts, 1e-5, 1.0)
    monkeypatch.setattr("lowkey.account.losses._SETTLED", -1.0)
    # 0.2 % is what an answer may still move by when it counts as settled.
    assert settled * (1 - 2e-3) <= epsilon_from_losses(counts, 1e-5, 1.0) <= settled


def test_nothing_released_costs_nothing() -> None:
    assert epsilon([], 1e-5) == 0.0
    assert epsilon([(0.5, 1.0, 0)], 1e-5) == 0.0


def test_one_release_without_noise_voids_everything() -> None:
    assert math.isinf(epsilon([(0.01, 2.0, 100), (0.01, 0.0, 1)], 1e-5))


def test_a_budget_so_small_that_delta_covers_it_is_zero() -> None:
    assert epsilon([(1e-7, 5.0, 1)], 1e-5) == 0.0
    assert math.isinf(renyi_epsilon([event(0.1, 0.0, 1)], 1e-5))


def test_equal_stretches_are_composed_as_one() -> None:
    assert epsilon([(0.01, 1.0, 1)] * 500, 1e-5) == epsilon([(0.01, 1.0, 500)], 1e-5)


def test_order_of_events_does_not_matter() -> None:
    history = [(0.01, 1.5, 50), (1.0, 20.0, 3), (0.02, 2.5, 50), (1.0, 30.0, 2)]
    assert epsilon(history, 1e-5) == epsilon(history[::-1], 1e-5)


def test_the_report_names_the_accountant_that_won() -> None:
    assert compose([event(0.025, 2.0, 1200)], 1e-5).accountant is Accountant.PLD
    assert compose([event(0.025, 2.0, 1200)], 1e-14).accountant is Accountant.RDP


@pytest.mark.parametrize(
    ("larger", "smaller"),
    [((0.01, 1.0, 200), (0.01, 1.0, 100)), ((0.02, 1.0, 100), (0.01, 1.0, 100)), ((0.01, 1.0, 100), (0.01, 1.2, 100))],
)
def test_epsilon_grows_with_steps_and_rate_and_falls_with_noise(
    larger: tuple[float, float, int], smaller: tuple[float, float, int]
) -> None:
    assert epsilon([larger], 1e-6) > epsilon([smaller], 1e-6)


@pytest.mark.parametrize(
    ("history", "delta", "hint"),
    [
        ([(1.4, 1.0, 1)], 1e-5, "not a probability"),
        ([(256, 1.0, 1)], 1e-5, "expected_batch_size"),
        ([(0.0, 1.0, 1)], 1e-5, "not a probability"),
        ([(0.1, -1.0, 1)], 1e-5, "noise_multiplier"),
        ([(0.1, math.nan, 1)], 1e-5, "nan"),
        ([(0.1, math.inf, 1)], 1e-5, "finite"),
        ([(0.1, 1.0, -1)], 1e-5, "num_steps"),
        ([(0.1, 1.0, 1.5)], 1e-5, "num_steps"),
        ([(0.1, 1.0, 1)], 8.0, "swap"),
        ([(0.1, 1.0, 1)], 0.0, "delta"),
        ([(0.1, 1.0, True)], 1e-5, "num_steps"),
        ((0.1, 1.0, 1), 1e-5, "triples"),
        ([(0.1, "1.0", 1)], 1e-5, "real number"),
    ],
)
def test_a_history_that_means_nothing_is_refused(history: object, delta: float, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        epsilon(history, delta)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("sampling", [Unsampled(), TruncatedPoisson(max_batch_size=10)])
def test_samplers_that_need_the_data_set_size_ask_for_it(sampling: Unsampled | TruncatedPoisson) -> None:
    with pytest.raises(ConfigError, match="num_examples"):
        event(0.1, 1.0, 1, sampling=sampling)
    assert event(0.1, 1.0, 1, sampling=Poisson()).num_examples is None
