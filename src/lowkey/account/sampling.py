"""Who takes part in a step: the facts that an accountant needs, and nothing else.

The samplers themselves live in `lowkey.sample`; these records describe them, and the plan, the ledger and the statement carry them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

from lowkey.checks import require_count


@dataclass(frozen=True, kw_only=True)
class Poisson:
    """Every example joins each step by its own coin, with probability ``expected_batch_size / num_examples``.

    Guarantee:
        Amplification by subsampling, exactly as the accountant computes it, for adding or removing one example.

    Assumes:
        Each step draws afresh, and an empty batch still makes a release.
    """

    def __str__(self) -> str:
        return "Poisson"


@dataclass(frozen=True, kw_only=True)
class TruncatedPoisson:
    """Poisson, but a draw above ``max_batch_size`` keeps a uniformly random subset of that many examples.

    Fields:
        max_batch_size: The most examples that one step may use; it bounds memory.

    Guarantee:
        Amplification by subsampling, with the chance of a truncation charged in full.
    """

    max_batch_size: int

    def __post_init__(self) -> None:
        require_count("max_batch_size", self.max_batch_size)

    @classmethod
    def from_expected(cls, expected_batch_size: int) -> TruncatedPoisson:
        """Cap at five standard deviations above the mean, which costs under 0.1 % of epsilon."""
        require_count("expected_batch_size", expected_batch_size)
        return cls(max_batch_size=math.ceil(expected_batch_size + 5.0 * math.sqrt(expected_batch_size)))

    def __str__(self) -> str:
        return f"Poisson truncated at {self.max_batch_size}"


@dataclass(frozen=True, kw_only=True)
class Unsampled:
    """Shuffled batches of a fixed size: an example takes part at most once an epoch, and nothing is amplified.

    Guarantee:
        That of ``ceil(num_steps * expected_batch_size / num_examples)`` Gaussian releases of the whole data set.

    Assumes:
        The batches of an epoch are disjoint and cover every example (``drop_last=False``), and the order does not depend on the examples.
    """

    def __str__(self) -> str:
        return "shuffled batches, no amplification"


Sampling: TypeAlias = Poisson | TruncatedPoisson | Unsampled
"""Every way of taking part that has an accountant."""


def count_epochs(*, num_steps: int, expected_batch_size: int, num_examples: int) -> int:
    """Return the most often that one example can take part in ``num_steps`` shuffled batches.

    Guarantee:
        Never too small when every epoch covers all examples: computed in integers, so nothing is rounded.
    """
    return -(-num_steps * expected_batch_size // num_examples)
