"""The price of a search, and the figures that papers printed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lowkey.account import (
    Event,
    TrialCount,
    compose_trials,
    draw_num_trials,
    epsilon,
    gaussian_limit_epsilon,
    moments_epsilon_2017,
    renyi_epsilon,
)
from lowkey.errors import ConfigError

ONE = Event(sampling_rate=0.025, noise_multiplier=4.0, num_steps=1200)


def test_ten_geometric_trials_cost_what_papernot_and_steinke_say() -> None:
    # Source: dp-accounting 0.6, RepeatAndSelectDpEvent(mean=10, shape=1); a single trial costs .8945 by the same accountant.
    assert renyi_epsilon([ONE], 1e-5) == pytest.approx(0.8945, rel=1e-3)
    assert compose_trials([ONE], 1e-5, mean_trials=10).epsilon == pytest.approx(1.915, rel=1e-3)


@pytest.mark.parametrize(("count", "shape"), [(TrialCount.GEOMETRIC, 1.0), (TrialCount.LOGARITHMIC, 0.0), (TrialCount.POISSON, math.inf)])
@pytest.mark.parametrize("mean", [2.0, 30.0])
def test_every_distribution_equals_dp_accounting(count: TrialCount, shape: float, mean: float) -> None:
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    trial = dp_accounting.SelfComposedDpEvent(dp_accounting.PoissonSampledDpEvent(0.025, dp_accounting.GaussianDpEvent(4.0)), 1200)
    accountant = RdpAccountant()
    accountant.compose(dp_accounting.dp_event.RepeatAndSelectDpEvent(trial, mean, shape))
    ours = compose_trials([ONE], 1e-5, mean_trials=mean, count=count).epsilon
    assert ours == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-4)


@pytest.mark.parametrize("count", TrialCount)
def test_the_number_of_trials_has_the_mean_that_is_charged(count: TrialCount) -> None:
    generator = np.random.default_rng(5)
    drawn = [draw_num_trials(generator, mean_trials=8.0, count=count) for _ in range(20_000)]
    # Five standard errors of the widest of the three (logarithmic: deviation about 13).
    assert np.mean(drawn) == pytest.approx(8.0, abs=5 * 13 / math.sqrt(20_000))


@pytest.mark.parametrize("count", [TrialCount.GEOMETRIC, TrialCount.LOGARITHMIC])
def test_a_mean_of_one_is_always_one_trial(count: TrialCount) -> None:
    assert {draw_num_trials(np.random.default_rng(seed), mean_trials=1.0, count=count) for seed in range(20)} == {1}


@pytest.mark.parametrize("count", TrialCount)
def test_more_trials_cost_more(count: TrialCount) -> None:
    costs = [compose_trials([ONE], 1e-5, mean_trials=mean, count=count).epsilon for mean in (1.0, 3.0, 10.0, 100.0)]
    assert costs == sorted(costs)
    assert costs[0] >= renyi_epsilon([ONE], 1e-5)


@pytest.mark.parametrize("mean", [0.5, math.inf, math.nan])
def test_a_mean_that_is_no_count_is_refused(mean: float) -> None:
    with pytest.raises(ConfigError, match="mean_trials"):
        compose_trials([ONE], 1e-5, mean_trials=mean)


def test_trials_without_noise_or_releases_have_the_obvious_cost() -> None:
    no_noise = Event(sampling_rate=0.1, noise_multiplier=0.0, num_steps=1)
    assert math.isinf(compose_trials([no_noise], 1e-5, mean_trials=2).epsilon)
    assert math.isfinite(compose_trials([], 1e-5, mean_trials=2).epsilon)


# Source: zhou2021pdp, table of epsilons for sigma 2 to 18 (q = .025, 1200 steps, delta 1e-5), printed with two decimals.
@pytest.mark.parametrize(("noise", "printed"), [(2, 2.41), (4, 1.09), (6, 0.72), (8, 0.53), (10, 0.42), (14, 0.30), (18, 0.23)])
def test_the_2017_conversion_gives_the_published_table(noise: float, printed: float) -> None:
    published = moments_epsilon_2017([(0.025, noise, 1200)], 1e-5)
    assert published.value == pytest.approx(printed, abs=0.01)
    assert published.value > epsilon([(0.025, noise, 1200)], 1e-5)
    assert "not a bound" in str(published)


def test_the_gaussian_limit_is_exact_for_the_gaussian_and_too_small_elsewhere() -> None:
    assert gaussian_limit_epsilon([(1.0, 1.0, 1)], 1e-5).value == pytest.approx(4.37718, rel=1e-5)
    assert gaussian_limit_epsilon([(0.025, 2.0, 1200)], 1e-5).value < epsilon([(0.025, 2.0, 1200)], 1e-5)
    assert gaussian_limit_epsilon([], 1e-5).value == 0.0
    assert math.isinf(gaussian_limit_epsilon([(0.5, 0.0, 1)], 1e-5).value)
