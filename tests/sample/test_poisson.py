"""Poisson batches: their number, their structure when empty, where their randomness comes from; their law is in test_draws."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from lowkey.account import Plan, TruncatedPoisson, Unsampled
from lowkey.errors import ConfigError
from lowkey.sample import batch_size, num_drawn, num_seeded, poisson_batches, split
from tests.sample.plans import a_plan

X, Y = torch.arange(40.0).reshape(20, 2), torch.arange(20)


class Dictionaries(Dataset[dict[str, object]]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"x": X[index], "name": f"number {index}", "y": index}


class FetchesMany(Dictionaries):
    """Reads many examples at once, and fails on none, like a Hugging Face dataset."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, object]]:
        assert indices
        return [self[index] for index in indices]


DATASETS: dict[str, Callable[[], object]] = {
    "tensors": lambda: TensorDataset(X, Y),
    "list": lambda: [(X[index], index) for index in range(20)],
    "subset": lambda: Subset(TensorDataset(X.repeat(2, 1), Y.repeat(2)), range(20)),
    "dictionaries": Dictionaries,
    "fetches many": FetchesMany,
}
every_dataset = pytest.mark.parametrize("make", DATASETS.values(), ids=DATASETS.keys())


def rare_plan(num_steps: int = 40) -> Plan:
    """A plan whose batches are empty about a third of the time."""
    return a_plan(expected_batch_size=1, num_steps=num_steps)


@every_dataset
def test_there_are_exactly_as_many_batches_as_planned(make: Callable[[], object]) -> None:
    batches = poisson_batches(make(), a_plan())
    assert len(batches) == 8
    assert len(list(batches)) == 8


@pytest.mark.parametrize("num_steps", [0, 3, 8, np.int64(2)])
def test_a_resumed_run_draws_only_what_is_left(num_steps: int) -> None:
    batches = poisson_batches(TensorDataset(X), a_plan(), num_steps=num_steps)
    assert len(batches) == len(list(batches)) == num_steps


@every_dataset
def test_empty_batches_come_with_the_structure_of_the_others(make: Callable[[], object]) -> None:
    batches = list(poisson_batches(make(), rare_plan(), seed=1))
    empty = next(batch for batch in batches if batch_size(batch) == 0)
    full = next(batch for batch in batches if batch_size(batch) > 0)
    x_of_empty, x_of_full = (batch["x"] if isinstance(batch, dict) else batch[0] for batch in (empty, full))
    assert type(empty) is type(full)
    assert len(empty) == len(full)
    assert x_of_empty.shape == (0, 2)
    assert x_of_empty.dtype == x_of_full.dtype
    assert split(empty, 4) == []


@every_dataset
def test_every_reader_sees_the_same_draws(make: Callable[[], object]) -> None:
    expected = [batch[1] for batch in poisson_batches(TensorDataset(X, Y), a_plan(), seed=3)]
    read = [batch["y"] if isinstance(batch, dict) else batch[1] for batch in poisson_batches(make(), a_plan(), seed=3)]
    assert all(map(torch.equal, expected, read))


def test_examples_of_a_batch_belong_together() -> None:
    for x, y in poisson_batches(TensorDataset(X, Y), a_plan()):
        assert torch.equal(x, X[y])


def test_a_collate_function_makes_the_batch() -> None:
    plan = a_plan()
    batches = list(poisson_batches(range(20), plan, collate_fn=list, seed=0))
    assert all(batch == sorted(set(batch)) for batch in batches)


def test_a_batch_never_exceeds_the_cap() -> None:
    plan = a_plan(sampling=TruncatedPoisson(max_batch_size=6), num_steps=200)
    sizes = [len(batch[0]) for batch in poisson_batches(TensorDataset(X), plan)]
    assert max(sizes) == 6


def test_certain_participation_draws_everyone() -> None:
    plan = a_plan(expected_batch_size=20, num_steps=2)
    assert all(torch.equal(batch[0], Y) for batch in poisson_batches(TensorDataset(Y), plan))


def test_workers_change_no_draw() -> None:
    plan = rare_plan(6)
    here, there = (list(poisson_batches(Dictionaries(), plan, seed=2, num_workers=workers)) for workers in (0, 1))
    assert [batch["name"] for batch in here] == [batch["name"] for batch in there]


def draw_sizes(seed: int | None = None) -> list[list[int]]:
    return [batch[0].tolist() for batch in poisson_batches(TensorDataset(Y), a_plan(num_steps=30), seed=seed)]


def test_global_seeds_do_not_decide_who_takes_part() -> None:
    def seeded_draw() -> list[list[int]]:
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002 - the global generator is the subject
        return draw_sizes()

    assert seeded_draw() != seeded_draw()


def test_drawing_leaves_the_global_generator_of_torch_alone() -> None:
    before = torch.get_rng_state()
    draw_sizes()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_second_iteration_draws_anew() -> None:
    batches = poisson_batches(TensorDataset(Y), a_plan(num_steps=30))
    first, second = ([batch[0].tolist() for batch in batches] for _ in range(2))
    assert first != second


def test_a_seed_replays_draws_and_its_high_bits_count() -> None:
    assert draw_sizes(5) == draw_sizes(5) != draw_sizes(5 + 2**32)


def test_batches_are_counted_for_their_plan_as_they_are_handed_out() -> None:
    plan = a_plan()
    batches = iter(poisson_batches(TensorDataset(X), plan))
    counts = [num_drawn(plan)]
    for _ in range(2):
        next(batches)
        counts.append(num_drawn(plan))
    assert counts == [0, 1, 2]
    assert num_seeded(plan) == 0


def test_an_equal_plan_of_another_run_has_no_evidence() -> None:
    plan = a_plan()
    list(poisson_batches(TensorDataset(X), plan))
    assert num_drawn(copy.copy(plan)) == 0
    assert num_drawn(object()) == 0


def test_evidence_leaves_with_its_plan() -> None:
    from lowkey.sample.evidence import _tallies

    before = len(_tallies)
    plan = a_plan()
    list(poisson_batches(TensorDataset(X), plan, num_steps=1))
    assert len(_tallies) == before + 1
    del plan
    assert len(_tallies) == before


def test_seeded_draws_are_told_apart() -> None:
    plan = a_plan()
    list(poisson_batches(TensorDataset(X), plan, seed=1, num_steps=3))
    list(poisson_batches(TensorDataset(X), plan, num_steps=2))
    assert (num_drawn(plan), num_seeded(plan)) == (5, 3)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 1


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (TensorDataset(X[:19]), "dataset has 19 examples but the plan was made for num_examples=20"),
        ((X, Y), r"TensorDataset\(\*dataset\)"),
        ({"x": X, "y": Y}, "counts columns or splits"),
        (DataLoader(TensorDataset(X), batch_size=4), r"Pass loader\.dataset"),
        (Stream(), "stream cannot be sampled"),
        (iter(range(20)), "without len"),
    ],
)
def test_a_dataset_that_does_not_fit_the_plan_is_refused(dataset: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        poisson_batches(dataset, a_plan())


@pytest.mark.parametrize("num_steps", [-1, 9, 2.5, True])
def test_steps_that_the_plan_does_not_pay_for_are_refused(num_steps: int) -> None:
    with pytest.raises(ConfigError, match=r"must lie in \[0, 8\]"):
        poisson_batches(TensorDataset(X), a_plan(), num_steps=num_steps)


@pytest.mark.parametrize("num_workers", [-1, 0.5, True])
def test_a_meaningless_number_of_workers_is_refused(num_workers: int) -> None:
    with pytest.raises(ConfigError, match="num_workers"):
        poisson_batches(TensorDataset(X), a_plan(), num_workers=num_workers)


def test_an_unsampled_plan_is_pointed_to_its_own_batches() -> None:
    with pytest.raises(ConfigError, match="unsampled_batches"):
        poisson_batches(TensorDataset(X), a_plan(sampling=Unsampled()))
