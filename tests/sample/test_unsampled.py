"""Shuffled batches: disjoint within an epoch, in line with what the accountant charges, and resumable."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils.data import TensorDataset

from lowkey.account import Plan, Poisson, Unsampled
from lowkey.account.sampling import count_epochs
from lowkey.errors import ConfigError
from lowkey.sample import num_drawn, num_seeded, unsampled_batches
from tests.sample.plans import a_plan

DATA = TensorDataset(torch.arange(20))


def plan_of(size: int, num_steps: int) -> Plan:
    return a_plan(expected_batch_size=size, num_steps=num_steps, sampling=Unsampled())


def drawn(plan: Plan, *, seed: int = 0, start_step: int = 0) -> list[list[int]]:
    return [batch[0].tolist() for batch in unsampled_batches(DATA, plan, seed=seed, start_step=start_step)]


@pytest.mark.parametrize("size", [1, 6, 7, 20])
def test_an_epoch_shows_every_example_once(size: int) -> None:
    per_epoch = -(-20 // size)
    batches = drawn(plan_of(size, 2 * per_epoch))
    for epoch in (batches[:per_epoch], batches[per_epoch:]):
        assert sorted(example for batch in epoch for example in batch) == list(range(20))
        assert all(len(batch) <= size for batch in epoch)


@pytest.mark.parametrize("size", [1, 6, 7, 20])
@pytest.mark.parametrize("num_steps", [1, 5, 17])
def test_nobody_takes_part_more_often_than_the_accountant_charges(size: int, num_steps: int) -> None:
    counts = Counter(example for batch in drawn(plan_of(size, num_steps)) for example in batch)
    assert max(counts.values()) <= count_epochs(num_steps=num_steps, expected_batch_size=size, num_examples=20)


def test_epochs_are_ordered_anew() -> None:
    batches = drawn(plan_of(20, 2))
    assert batches[0] != batches[1]
    assert batches[0] != list(range(20))


def test_a_resumed_run_goes_on_where_the_epoch_stopped() -> None:
    plan = plan_of(6, 11)
    assert drawn(plan, start_step=5) == drawn(plan)[5:]
    assert len(unsampled_batches(DATA, plan, seed=0, start_step=5)) == 6


def test_seeds_that_agree_in_their_low_32_bits_give_other_orders() -> None:
    assert drawn(plan_of(20, 1), seed=5) != drawn(plan_of(20, 1), seed=5 + 2**32)


def test_batches_are_counted_and_need_no_secret_seed() -> None:
    plan = plan_of(5, 4)
    drawn(plan)
    assert (num_drawn(plan), num_seeded(plan)) == (4, 0)


def test_a_poisson_plan_is_refused() -> None:
    with pytest.raises(ConfigError, match="carry no amplification"):
        unsampled_batches(DATA, a_plan(sampling=Poisson()), seed=0)


@pytest.mark.parametrize("start_step", [-1, 5, 0.5, True])
def test_a_start_outside_the_plan_is_refused(start_step: int) -> None:
    with pytest.raises(ConfigError, match="start_step"):
        unsampled_batches(DATA, plan_of(5, 4), seed=0, start_step=start_step)
