"""What a plan promises, what it refuses, and what its statement says."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import pytest

from lowkey.account import Accountant, NoiseOrigin, Plan, Poisson, Sampling, TruncatedPoisson, Unsampled
from lowkey.account.sampling import count_epochs
from lowkey.account.statement import format_up
from lowkey.errors import ConfigError

PLAN = Plan(noise_multiplier=2.0, delta=1e-5, num_examples=10_000, expected_batch_size=250, num_steps=1200)


# Source: dp-accounting 0.6, delta 1e-5; 14.83 is one Gaussian release with noise 2 / sqrt(30).
@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Poisson(), 1.8773),
        (TruncatedPoisson(max_batch_size=330), 1.8773),
        (TruncatedPoisson(max_batch_size=250), 5.955),
        (Unsampled(), 14.83),
    ],
    ids=str,
)
def test_a_plan_knows_its_epsilon(sampling: Sampling, expected: float) -> None:
    assert replace(PLAN, sampling=sampling).epsilon == pytest.approx(expected, rel=1e-3)


def test_a_plan_of_the_whole_data_set_is_the_gaussian_mechanism() -> None:
    # Source: closed form of the Gaussian mechanism, noise 1, delta 1e-5.
    whole = Plan(noise_multiplier=10.0, delta=1e-5, num_examples=1000, expected_batch_size=1000, num_steps=100)
    assert whole.sampling_rate == 1.0
    assert whole.epsilon == pytest.approx(4.37718, rel=1e-5)


def test_a_plan_without_noise_has_no_guarantee() -> None:
    assert math.isinf(PLAN.with_noise(0.0).epsilon)


def test_epsilon_grows_along_the_plan_and_ends_at_its_total() -> None:
    along = [PLAN.epsilon_after(steps) for steps in (0, 1, 300, 600, 1200, 2400)]
    assert along[0] == 0.0
    assert along == sorted(along)
    assert along[4] == PLAN.epsilon
    assert PLAN.accountant is Accountant.PLD


def test_an_unsampled_plan_counts_started_epochs() -> None:
    shuffled = replace(PLAN, sampling=Unsampled())
    assert shuffled.epsilon_after(1) == shuffled.epsilon_after(40) < shuffled.epsilon_after(41) == shuffled.epsilon_after(80)


@pytest.mark.parametrize(("steps", "epochs"), [(1, 1), (3, 1), (4, 2), (6, 2), (7, 3)])
def test_no_example_takes_part_more_often_than_the_epochs_counted(steps: int, epochs: int) -> None:
    # Ten examples in batches of 4, 4 and 2: an example's turn comes once every three steps.
    assert count_epochs(num_steps=steps, expected_batch_size=4, num_examples=10) >= epochs


def test_a_plan_is_a_value() -> None:
    same = Plan(noise_multiplier=2.0, delta=1e-5, num_examples=10_000, expected_batch_size=250, num_steps=1200, sampling=Poisson())
    assert same == PLAN
    assert hash(PLAN) == hash(same)
    assert PLAN.epsilon > 0
    assert pickle.loads(pickle.dumps(PLAN)) == same


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ({"delta": 1e-3}, "above 1/num_examples"),
        ({"delta": 8.0}, "swap epsilon and delta"),
        ({"delta": 0.0}, "delta"),
        ({"noise_multiplier": -1.0}, "at least 0"),
        ({"noise_multiplier": math.inf}, "finite"),
        ({"noise_multiplier": math.nan}, "nan"),
        ({"noise_multiplier": "2"}, "real number"),
        ({"num_examples": 0}, "at least 1"),
        ({"num_steps": 0}, "at least 1"),
        ({"num_steps": 3.5}, "int"),
        ({"expected_batch_size": 0}, "at least 1"),
        ({"expected_batch_size": 0.025}, "Did you mean expected_batch_size=250"),
        ({"expected_batch_size": 20_000}, "swap the two"),
        ({"expected_batch_size": True}, "bool"),
        ({"sampling": "poisson"}, "has no accountant"),
        ({"sampling": Poisson}, "has no accountant"),
        ({"sampling": TruncatedPoisson(max_batch_size=249)}, r"TruncatedPoisson.from_expected\(250\)"),
    ],
    ids=str,
)
def test_a_plan_that_means_nothing_is_refused(wrong: dict[str, object], hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        replace(PLAN, **wrong)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("expected", "cap"), [(1, 6), (250, 330), (256, 336), (1000, 1159)])
def test_the_default_cap_is_five_deviations_above_the_mean(expected: int, cap: int) -> None:
    assert TruncatedPoisson.from_expected(expected) == TruncatedPoisson(max_batch_size=cap)


@pytest.mark.parametrize("cap", [0, -1, 2.5])
def test_a_cap_counts_examples(cap: int) -> None:
    with pytest.raises(ConfigError, match="max_batch_size"):
        TruncatedPoisson(max_batch_size=cap)


# The statement --------------------------------------------------------------


def test_the_first_line_can_be_quoted() -> None:
    first = str(PLAN.statement()).splitlines()[0]
    assert first == "(ε = 1.88, δ = 1e-05)-DP per example, adding or removing one; Poisson, 1200 steps, PLD"


@pytest.mark.parametrize(
    "fact",
    [
        "one example",
        "add or remove one example",
        "number of examples is public",
        "q = 0.025",
        "250 expected of 10000",
        "1200 of 1200 planned",
        "σ = 2, clip norm C = 1.5, system noise",
        "method           Grape",
        "PLD, the smaller of",
        "floating-point",
        "gradient norms",
        "W_0 is public",
    ],
)
def test_the_statement_says_everything_the_number_needs(fact: str) -> None:
    filled = replace(PLAN.statement(), method="Grape", clip_norm=1.5, noise_source=NoiseOrigin.SYSTEM).with_caveat("W_0 is public")
    assert fact in str(filled)
    assert filled.has_guarantee


def test_a_statement_of_fewer_releases_says_how_many() -> None:
    part = PLAN.statement(600)
    assert part.epsilon == PLAN.epsilon_after(600) < PLAN.epsilon
    assert "600 of 1200 planned" in str(part)


def test_seeded_noise_is_stamped_as_no_guarantee() -> None:
    stamped = replace(PLAN.statement(), noise_source=NoiseOrigin.SEEDED)
    assert not stamped.has_guarantee
    assert str(stamped).startswith("No privacy guarantee (ε = ∞): the noise comes from a known seed")
    assert "accountant" not in str(stamped)


def test_a_plan_without_noise_is_stamped_as_no_guarantee() -> None:
    assert str(PLAN.with_noise(0.0).statement()).startswith("No privacy guarantee (ε = ∞): no noise was planned.")


def test_any_other_reason_against_a_guarantee_is_named() -> None:
    void = PLAN.statement().without_guarantee("The basis was built from the private batch.")
    assert not void.has_guarantee
    assert str(void).startswith("No privacy guarantee (ε = ∞): The basis was built from the private batch.")


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.8773, "1.88"), (3.0, "3.00"), (3.0000001, "3.01"), (0.09412, "0.0942"), (0.5, "0.500"), (0.0, "0"), (math.inf, "∞")],
)
def test_a_printed_epsilon_is_never_below_the_number(value: float, text: str) -> None:
    assert format_up(value) == text
