"""Which loaders may feed which plan."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from lowkey.account.sampling import Unsampled
from lowkey.errors import ConfigError
from lowkey.sample.poisson import PoissonBatches
from lowkey.sample.reader import check_examples
from lowkey.sample.unsampled import UnsampledBatches

if TYPE_CHECKING:
    from lowkey.account import Plan

_POISSON = "Use poisson_batches(dataset, plan)"


def check_loader(loader: object, plan: Plan) -> None:
    """Refuse a loader whose batches are not drawn the way the plan's accountant assumes.

    Args:
        loader: What the training loop iterates over.
        plan: The plan that its steps are charged to.

    Raises:
        ConfigError: With the reason and the way out, for everything that is not known to fit.

    Guarantee:
        What passes is lowkey's own batches for this plan, or, under an `Unsampled` plan, a torch loader that shows each example at most
        once an epoch. No torch loader passes under a Poisson plan.

    Assumes:
        An accepted torch loader is used from the start of an epoch, and its batch sampler is left alone.
    """
    if isinstance(loader, (PoissonBatches, UnsampledBatches)):
        _check_own(loader, plan)
        return
    # PRIVACY: a subclass may iterate as it likes, so only torch's own loader is known.
    if type(loader) is not DataLoader:
        raise ConfigError(
            f"loader is a {type(loader).__name__}, and nothing tells how it draws. The accountant must know who can take part. {_POISSON}."
        )
    torch_loader = cast("DataLoader[object]", loader)
    _check_batching(torch_loader)
    sampler = cast("BatchSampler", torch_loader.batch_sampler).sampler
    _check_sampler(sampler)
    if not isinstance(plan.sampling, Unsampled):
        raise ConfigError(
            f"loader cuts fixed-size batches, but the plan says {plan.sampling}. Its epsilon holds only if every example joins each step "
            f"by its own coin. {_POISSON}, or plan with sampling=Unsampled(), whose epsilon is larger."
        )
    check_examples(torch_loader.dataset, plan.num_examples)
    _check_epoch(len(cast("Sized", sampler)), plan)
    _check_size(torch_loader, plan)


def _check_own(loader: PoissonBatches | UnsampledBatches, plan: Plan) -> None:
    if loader.plan is not plan and loader.plan != plan:
        raise ConfigError(
            "loader was made for another plan than the one its steps are charged to. Rates and sizes may differ. "
            "Pass the same plan to both."
        )


def _check_sampler(sampler: object) -> None:
    if isinstance(sampler, WeightedRandomSampler):
        raise ConfigError(
            "loader uses WeightedRandomSampler, so some examples join more often than the accountant assumes and lose more privacy. "
            f"{_POISSON}, and weight the losses by public class weights instead."
        )
    if isinstance(sampler, DistributedSampler):
        raise ConfigError(
            "loader uses DistributedSampler, which pads the last batches with duplicates, so an example can count twice in one step. "
            f"{_POISSON} on every rank, and let the process group add the sums."
        )
    if isinstance(sampler, RandomSampler):
        _check_random(sampler)
    elif type(sampler) is not SequentialSampler:
        raise ConfigError(
            f"loader uses {type(sampler).__name__}, and nothing tells how often it shows an example. "
            f"{_POISSON}, or draw from torch.utils.data.Subset(dataset, indices) instead of restricting the sampler."
        )


def _check_random(sampler: RandomSampler) -> None:
    if sampler.replacement:
        raise ConfigError(
            f"loader samples with replacement, so an example can count several times in one step, and no accountant covers it. {_POISSON}."
        )
    count = len(cast("Any", sampler.data_source))
    if sampler.num_samples != count:
        raise ConfigError(
            f"loader draws {sampler.num_samples} of {count} examples an epoch. An example could then take part more often than once "
            f"an epoch of the plan. {_POISSON}, or leave num_samples unset."
        )


def _check_epoch(shown: int, plan: Plan) -> None:
    if shown != plan.num_examples:
        raise ConfigError(
            f"loader shows {shown} examples an epoch but the plan was made for num_examples={plan.num_examples}. "
            "The number of epochs that are charged follows from it. Give the sampler the planned dataset."
        )


def _check_batching(loader: DataLoader[object]) -> None:
    if loader.drop_last or getattr(loader.batch_sampler, "drop_last", False):
        raise ConfigError(
            "loader has drop_last=True. Epochs that leave examples out are shorter, so the others take part more often than is charged. "
            "Set drop_last=False, or use poisson_batches(dataset, plan)."
        )
    if type(loader.batch_sampler) is not BatchSampler:
        raise ConfigError(
            f"loader uses {type(loader.batch_sampler).__name__} as its batch sampler, and nothing tells how it forms batches. {_POISSON}."
        )


def _check_size(loader: DataLoader[object], plan: Plan) -> None:
    size = cast("BatchSampler", loader.batch_sampler).batch_size
    if size != plan.expected_batch_size:
        raise ConfigError(
            f"loader has batches of {size} but the plan was made for expected_batch_size={plan.expected_batch_size}. "
            "The number of epochs that are charged follows from it. Use the planned size, and cut each batch with split() to fit memory."
        )
