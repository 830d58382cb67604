"""Loaders that do not draw what the accountant assumes are refused, each for its own reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from lowkey.account import Plan, Poisson, TruncatedPoisson, Unsampled
from lowkey.errors import ConfigError
from lowkey.sample import check_loader, poisson_batches, unsampled_batches
from tests.sample.plans import a_plan

DATA = TensorDataset(torch.arange(20))
UNSAMPLED = a_plan(sampling=Unsampled())


class OwnBatches(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        yield [0, 0]


class Reshuffled(DataLoader[tuple[torch.Tensor, ...]]):
    """Could iterate in any way."""


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader(DATA, 5, shuffle=True, drop_last=True), "drop_last=True"),
        (DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 5, drop_last=True)), "drop_last=True"),
        (DataLoader(DATA, 5, sampler=WeightedRandomSampler([1.0] * 20, 20)), "WeightedRandomSampler"),
        (DataLoader(DATA, 5, sampler=RandomSampler(DATA, replacement=True)), "with replacement"),
        (DataLoader(DATA, 5, sampler=RandomSampler(DATA, num_samples=40)), "draws 40 of 20"),
        (DataLoader(DATA, 5, sampler=DistributedSampler(DATA, num_replicas=2, rank=0)), "pads the last batches"),
        (DataLoader(DATA, 5, sampler=SubsetRandomSampler([0, 0, 1])), "SubsetRandomSampler.*Subset"),
        (DataLoader(DATA, batch_sampler=OwnBatches()), "OwnBatches as its batch sampler"),
        (DataLoader(DATA, batch_size=None), "NoneType as its batch sampler"),
        (DataLoader(DATA, batch_sampler=BatchSampler(WeightedRandomSampler([1.0] * 20, 20), 5, drop_last=False)), "WeightedRandomSampler"),
        (Reshuffled(DATA, 5), "loader is a Reshuffled"),
        ([torch.zeros(5)], "loader is a list"),
    ],
)
@pytest.mark.parametrize("plan", [a_plan(), UNSAMPLED], ids=["poisson", "unsampled"])
def test_a_loader_with_the_wrong_law_is_refused_under_every_plan(loader: object, reason: str, plan: Plan) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_loader(loader, plan)


def test_a_sampler_over_other_examples_than_the_planned_ones_is_refused() -> None:
    with pytest.raises(ConfigError, match="shows 40 examples an epoch"):
        check_loader(DataLoader(DATA, 5, sampler=SequentialSampler(range(40))), UNSAMPLED)


@pytest.mark.parametrize("sampling", [Poisson(), TruncatedPoisson(max_batch_size=9)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_fixed_size_batches_never_get_a_poisson_epsilon(sampling: Poisson | TruncatedPoisson, shuffle: bool) -> None:
    with pytest.raises(ConfigError, match=r"Unsampled\(\)"):
        check_loader(DataLoader(DATA, 5, shuffle=shuffle), a_plan(sampling=sampling))


@pytest.mark.parametrize("shuffle", [True, False])
def test_fixed_size_batches_fit_an_unsampled_plan(shuffle: bool) -> None:
    check_loader(DataLoader(DATA, 5, shuffle=shuffle), UNSAMPLED)


@pytest.mark.parametrize("size", [4, 6])
def test_another_batch_size_than_planned_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=f"batches of {size} but"):
        check_loader(DataLoader(DATA, size, shuffle=True), UNSAMPLED)


def test_another_dataset_than_planned_is_refused() -> None:
    with pytest.raises(ConfigError, match="19 examples"):
        check_loader(DataLoader(TensorDataset(torch.arange(19)), 5), UNSAMPLED)


def test_batches_of_lowkey_fit_their_own_plan() -> None:
    plan = a_plan()
    check_loader(poisson_batches(DATA, plan), plan)
    check_loader(unsampled_batches(DATA, UNSAMPLED, seed=0), UNSAMPLED)


def test_batches_of_another_plan_are_refused() -> None:
    with pytest.raises(ConfigError, match="another plan"):
        check_loader(poisson_batches(DATA, a_plan()), a_plan(num_steps=9))
