"""Poisson batches: every example tosses its own coin at every step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import default_collate

from lowkey.account.sampling import TruncatedPoisson, Unsampled
from lowkey.errors import ConfigError
from lowkey.sample.evidence import record_draw
from lowkey.sample.generator import sampling_generator
from lowkey.sample.reader import BatchReader, Collate, Examples, Indices, check_examples

if TYPE_CHECKING:
    from lowkey.account import Plan


class PoissonBatches:
    """The batches of a plan, drawn afresh at each iteration; `len()` is their number.

    Made by `poisson_batches`. Each batch is counted for its plan when it is handed out.

    Guarantee:
        That of `poisson_batches`. A second iteration draws anew (or replays, with a seed), and its steps cost as much again.
    """

    def __init__(self, reader: BatchReader, plan: Plan, *, num_steps: int, seed: int | None, num_workers: int) -> None:
        self._reader = reader
        self._num_steps = num_steps
        self._seed = seed
        self._num_workers = num_workers
        self.plan = plan

    def __len__(self) -> int:
        return self._num_steps

    def __iter__(self) -> Iterator[Any]:
        for batch in self._reader.read(self._draws(), self._num_workers):
            record_draw(self.plan, seeded=self._seed is not None)
            yield batch

    def _draws(self) -> Iterator[Indices]:
        generator = sampling_generator(self._seed)
        sampling = self.plan.sampling
        cap = sampling.max_batch_size if isinstance(sampling, TruncatedPoisson) else None
        for _ in range(self._num_steps):
            yield draw_indices(generator, self.plan.num_examples, self.plan.sampling_rate, cap)


def poisson_batches(
    dataset: Examples,
    plan: Plan,
    *,
    collate_fn: Collate = default_collate,
    num_steps: int | None = None,
    seed: int | None = None,
    num_workers: int = 0,
) -> PoissonBatches:
    """Draw the batches of a Poisson or truncated Poisson plan.

    A batch may be empty: it then has the structure of any other and no example, and its step still makes a release.

    Args:
        dataset: A map-style dataset of `plan.num_examples` examples.
        plan: Says with what probability an example joins, how often to draw, and whether a cap holds.
        collate_fn: Makes a batch of a list of examples.
        num_steps: How many batches to draw; what is left of the plan, when a run resumes. Default: all of it.
        seed: Replays the draws of a test. Leave it None in a private run.
        num_workers: Processes that read examples ahead; they change no draw.

    Returns:
        An iterable with a length.

    Raises:
        ConfigError: If the dataset is not of the planned size, cannot be indexed, or the plan is not Poisson.

    Guarantee:
        Each example joins each batch independently with probability `plan.sampling_rate`, under adding or removing one example,
        decided by a key of its own from the operating system. Under a `TruncatedPoisson` plan a draw beyond `max_batch_size` keeps
        a uniform subset of that size. Exact up to the rounding of the binomial distribution in float64.

    Assumes:
        The batches are used once, in one run, and who was drawn is told to nobody.

    Cost:
        Time and memory grow with the batch; above a sampling rate of 2 % also 8 bytes for each example of the dataset.
    """
    if isinstance(plan.sampling, Unsampled):
        raise ConfigError(
            "the plan says Unsampled(), but poisson_batches draws Poisson batches. A statement must name the sampler that was used. "
            "Use unsampled_batches(dataset, plan, seed=...), or plan with Poisson() and pay a smaller epsilon."
        )
    check_examples(dataset, plan.num_examples)
    check_workers(num_workers)
    reader = BatchReader(dataset, collate_fn)
    return PoissonBatches(reader, plan, num_steps=steps_left(num_steps, plan.num_steps), seed=seed, num_workers=num_workers)


def draw_indices(generator: np.random.Generator, num_examples: int, sampling_rate: float, max_batch_size: int | None) -> Indices:
    """Draw who joins one step, in ascending order.

    Args:
        generator: Decides; nobody else may know or share its key.
        num_examples: Size of the dataset.
        sampling_rate: Probability that an example joins.
        max_batch_size: The cap of a truncated draw, or None.

    Returns:
        Distinct indices in `range(num_examples)`.

    Guarantee:
        Without a cap, the law of `num_examples` independent coins. With one, the law of `dp_accounting`'s
        `TruncatedSubsampledGaussianDpEvent`: a Poisson sample, truncated to the cap by sampling a random subset.
    """
    # PRIVACY: given its size a Poisson sample is a uniform subset, so a binomial size and a uniform subset are n coins in law.
    size = int(generator.binomial(num_examples, sampling_rate))
    # PRIVACY: a uniform subset of a uniform subset is uniform, so capping the size first draws what the accountant assumes.
    kept = size if max_batch_size is None else min(size, max_batch_size)
    indices = generator.choice(num_examples, size=kept, replace=False, shuffle=False)
    return np.sort(indices).astype(np.int64, copy=False)


def steps_left(num_steps: int | None, planned: int) -> int:
    """Return the number of batches to draw.

    Raises:
        ConfigError: If it is negative, no integer, or beyond the plan.

    Guarantee:
        Never more than the plan pays for.
    """
    if num_steps is None:
        return planned
    if isinstance(num_steps, bool) or num_steps != int(num_steps) or not 0 <= num_steps <= planned:
        raise ConfigError(
            f"num_steps={num_steps} is not a number of steps of this plan. It must lie in [0, {planned}], which is what epsilon pays for. "
            "Pass what is left of the plan, or plan again with more steps."
        )
    return int(num_steps)


def check_workers(num_workers: int) -> None:
    """Refuse a number of workers that means nothing.

    Raises:
        ConfigError: If it is negative or no integer.

    Guarantee:
        Workers read examples; they decide nothing about who takes part.
    """
    if isinstance(num_workers, bool) or num_workers < 0 or num_workers != int(num_workers):
        raise ConfigError(
            f"num_workers={num_workers} is not a number of processes. It must be an integer of at least 0. Pass 0 to read here."
        )
