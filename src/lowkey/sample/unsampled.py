"""Shuffled batches of a fixed size, for a plan that claims no amplification."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import default_collate

from lowkey.account.sampling import Unsampled
from lowkey.errors import ConfigError
from lowkey.sample.evidence import record_draw
from lowkey.sample.generator import order_generator
from lowkey.sample.poisson import check_workers
from lowkey.sample.reader import BatchReader, Collate, Examples, Indices, check_examples

if TYPE_CHECKING:
    from lowkey.account import Plan


class UnsampledBatches:
    """The batches of an `Unsampled` plan, in an order that a seed fixes; `len()` is their number.

    Made by `unsampled_batches`. Each batch is counted for its plan when it is handed out.

    Guarantee:
        That of `unsampled_batches`.
    """

    def __init__(self, reader: BatchReader, plan: Plan, *, start_step: int, seed: int, num_workers: int) -> None:
        self._reader = reader
        self._start_step = start_step
        self._seed = seed
        self._num_workers = num_workers
        self.plan = plan

    def __len__(self) -> int:
        return self.plan.num_steps - self._start_step

    def __iter__(self) -> Iterator[Any]:
        for batch in self._reader.read(self._slices(), self._num_workers):
            record_draw(self.plan, seeded=False)
            yield batch

    def _slices(self) -> Iterator[Indices]:
        size = self.plan.expected_batch_size
        per_epoch = -(-self.plan.num_examples // size)
        epoch, order = -1, None
        for step in range(self._start_step, self.plan.num_steps):
            if order is None or step // per_epoch != epoch:
                epoch = step // per_epoch
                order = order_generator(self._seed, epoch).permutation(self.plan.num_examples)
            start = step % per_epoch * size
            yield order[start : start + size]


def unsampled_batches(
    dataset: Examples,
    plan: Plan,
    *,
    seed: int,
    collate_fn: Collate = default_collate,
    start_step: int = 0,
    num_workers: int = 0,
) -> UnsampledBatches:
    """Cut shuffled epochs into batches of `plan.expected_batch_size`; the last batch of an epoch may be shorter.

    Args:
        dataset: A map-style dataset of `plan.num_examples` examples.
        plan: A plan with `sampling=Unsampled()`.
        seed: Fixes the order. It may be known to anyone: no amplification is claimed.
        collate_fn: Makes a batch of a list of examples.
        start_step: How many steps an interrupted run had taken; with its seed, the epoch goes on where it stopped.
        num_workers: Processes that read examples ahead; they change no order.

    Returns:
        An iterable with a length.

    Raises:
        ConfigError: If the dataset is not of the planned size, cannot be indexed, or the plan is not `Unsampled`.

    Guarantee:
        Each example takes part exactly once an epoch, so in at most as many steps as the plan's accountant charges, for adding or
        removing one example. The order depends on no example.

    Assumes:
        A resumed run passes the seed of the run that it goes on with.
    """
    if not isinstance(plan.sampling, Unsampled):
        raise ConfigError(
            f"the plan says {plan.sampling}, but shuffled batches of a fixed size carry no amplification. "
            "Use poisson_batches(dataset, plan), or plan with sampling=Unsampled() and its larger epsilon."
        )
    check_examples(dataset, plan.num_examples)
    check_workers(num_workers)
    if isinstance(start_step, bool) or start_step != int(start_step) or not 0 <= start_step <= plan.num_steps:
        raise ConfigError(
            f"start_step={start_step} is not a step of this plan. It must lie in [0, {plan.num_steps}], the steps that epsilon pays for. "
            "Pass the number of steps that were taken before."
        )
    reader = BatchReader(dataset, collate_fn)
    return UnsampledBatches(reader, plan, start_step=int(start_step), seed=seed, num_workers=num_workers)
