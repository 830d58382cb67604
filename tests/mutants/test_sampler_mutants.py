"""Would the sampler audit notice? Each mutant draws batches in one wrong way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import lowkey as lk
from lowkey.audit import Check, sampler

PLAN = lk.Plan(noise_multiplier=1.0, delta=1e-5, num_examples=2000, expected_batch_size=100, num_steps=100)
TRUNCATED = lk.Plan(
    noise_multiplier=1.0,
    delta=1e-5,
    num_examples=2000,
    expected_batch_size=100,
    num_steps=100,
    sampling=lk.TruncatedPoisson(max_batch_size=105),
)
EPOCHS = lk.Plan(noise_multiplier=1.0, delta=1e-5, num_examples=2000, expected_batch_size=150, num_steps=60, sampling=lk.Unsampled())

Draws = Callable[[np.random.Generator, int, float], Iterator[np.ndarray]]


def poisson(rng: np.random.Generator, n: int, rate: float) -> Iterator[np.ndarray]:
    while True:
        yield np.flatnonzero(rng.random(n) < rate)


def fixed_size(rng: np.random.Generator, n: int, rate: float) -> Iterator[np.ndarray]:
    while True:
        yield rng.choice(n, round(n * rate), replace=False)


def shuffled(rng: np.random.Generator, n: int, rate: float) -> Iterator[np.ndarray]:
    size = round(n * rate)
    while True:
        order = rng.permutation(n)
        yield from (order[start : start + size] for start in range(0, n - size + 1, size))


def with_replacement(rng: np.random.Generator, n: int, rate: float) -> Iterator[np.ndarray]:
    while True:
        yield rng.integers(0, n, rng.binomial(n, rate))


def neighbours_together(rng: np.random.Generator, n: int, rate: float) -> Iterator[np.ndarray]:
    while True:
        yield np.flatnonzero(np.repeat(rng.random(n // 2) < rate, 2))


def halves_together(rng: np.random.Generator, n: int, rate: float) -> Iterator[np.ndarray]:
    while True:
        yield np.flatnonzero(np.tile(rng.random(n // 2) < rate, 2))


def three_percent_more(rng: np.random.Generator, n: int, rate: float) -> Iterator[np.ndarray]:
    return poisson(rng, n, 1.03 * rate)


def same_draw_every_step(rng: np.random.Generator, n: int, rate: float) -> Iterator[np.ndarray]:
    draw = np.flatnonzero(rng.random(n) < rate)
    while True:
        yield draw


def same_draws_every_run(rng: np.random.Generator, n: int, rate: float) -> Iterator[np.ndarray]:
    return poisson(np.random.default_rng(7), n, rate)


def some_join_more_often(rng: np.random.Generator, n: int, rate: float) -> Iterator[np.ndarray]:
    rates = np.where(np.arange(n) % 2, 0.8 * rate, 1.2 * rate)
    while True:
        yield np.flatnonzero(rng.random(n) < rates)


def loud_and_quiet_steps(rng: np.random.Generator, n: int, rate: float) -> Iterator[np.ndarray]:
    while True:
        yield np.flatnonzero(rng.random(n) < rate * rng.choice([0.7, 1.3]))


def batches(draws: Draws, plan: lk.Plan) -> Callable[[Any, lk.Plan], Iterator[torch.Tensor]]:
    rng = np.random.default_rng(5)

    def make(dataset: Any, given: lk.Plan) -> Iterator[torch.Tensor]:
        numbers = dataset.tensors[0]
        found = draws(rng, plan.num_examples, plan.sampling_rate)
        return (numbers[torch.from_numpy(next(found))] for _ in range(plan.num_steps))

    return make


MUTANTS: dict[str, tuple[Draws, Check]] = {
    "fixed-size batches": (fixed_size, Check.SAMPLER_SIZE),
    "shuffled epochs, last batch dropped": (shuffled, Check.SAMPLER_REPEATS),
    "with replacement": (with_replacement, Check.SAMPLER_DUPLICATES),
    "neighbours together": (neighbours_together, Check.SAMPLER_PAIRS),
    "halves together": (halves_together, Check.SAMPLER_PAIRS),
    "rate 3 % high": (three_percent_more, Check.SAMPLER_RATE),
    "same draw every step": (same_draw_every_step, Check.SAMPLER_REPEATS),
    "same draws every run": (same_draws_every_run, Check.SAMPLER_REPEATS),
    "some join more often": (some_join_more_often, Check.SAMPLER_RATE),
    "loud and quiet steps": (loud_and_quiet_steps, Check.SAMPLER_SIZE),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_audit_names_what_a_sampler_breaks(name: str) -> None:
    draws, expected = MUTANTS[name]
    result = sampler(PLAN, batches(draws, PLAN))
    assert expected in {finding.check for finding in result.findings}, str(result)


def test_an_independent_poisson_sampler_passes() -> None:
    assert sampler(PLAN, batches(poisson, PLAN)).passed


def test_dropping_empty_batches_shows_in_their_number() -> None:
    few = lk.Plan(noise_multiplier=1.0, delta=1e-5, num_examples=100, expected_batch_size=1, num_steps=50)
    result = sampler(few, lambda dataset, plan: (b for b in lk.poisson_batches(dataset, plan) if len(b[0])), num_draws=5000)
    assert Check.SAMPLER_LENGTH in {finding.check for finding in result.findings}


def test_a_cap_that_is_not_kept_shows() -> None:
    result = sampler(TRUNCATED, batches(poisson, PLAN))
    assert Check.SAMPLER_SIZE in {finding.check for finding in result.findings}


def epochs(size: int, *, drop_last: bool) -> Callable[[Any, lk.Plan], Iterator[torch.Tensor]]:
    def make(dataset: Any, plan: lk.Plan) -> Iterator[torch.Tensor]:
        loader = torch.utils.data.DataLoader(dataset, batch_size=size, shuffle=True, drop_last=drop_last)
        taken = 0
        while taken < plan.num_steps:
            for batch in loader:
                if taken < plan.num_steps:
                    yield batch[0]
                taken += 1

    return make


def test_epochs_that_drop_their_last_batch_are_found() -> None:
    result = sampler(EPOCHS, epochs(150, drop_last=True))
    assert {finding.check for finding in result.findings} & {Check.SAMPLER_RATE, Check.SAMPLER_REPEATS}


def test_epochs_in_larger_batches_are_found() -> None:
    result = sampler(EPOCHS, epochs(200, drop_last=False))
    assert Check.SAMPLER_SIZE in {finding.check for finding in result.findings}


@pytest.mark.parametrize("plan", [PLAN, TRUNCATED, EPOCHS], ids=str)
def test_lowkeys_own_sampler_passes(plan: lk.Plan) -> None:
    result = sampler(plan)
    assert result.passed, str(result)
