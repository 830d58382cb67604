"""What has been released, in the terms that compose: how often, from how many, with how much noise."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import assert_never

from lowkey.account.sampling import Poisson, Sampling, TruncatedPoisson, Unsampled, count_epochs
from lowkey.checks import require_count, require_noise_multiplier, require_sampling_rate
from lowkey.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Event:
    """A stretch of releases that all had the same sampler and noise.

    Fields:
        sampling_rate: Expected batch size over data set size.
        noise_multiplier: Noise standard deviation over sensitivity; 0 means no noise and no guarantee.
        num_steps: How many releases; 0 is allowed and costs nothing.
        sampling: Who took part in each.
        num_examples: Data set size; needed by every sampler but `Poisson`.
    """

    sampling_rate: float
    noise_multiplier: float
    num_steps: int
    sampling: Sampling = field(default_factory=Poisson)
    num_examples: int | None = None

    def __post_init__(self) -> None:
        require_sampling_rate(self.sampling_rate)
        require_noise_multiplier(self.noise_multiplier)
        if self.num_steps != 0:
            require_count("num_steps", self.num_steps)
        if self.num_examples is not None:
            require_count("num_examples", self.num_examples)
        elif not isinstance(self.sampling, Poisson):
            raise ConfigError(
                f"num_examples is missing. The cost of {self.sampling} depends on the size of the data set. Pass num_examples=..."
            )


@dataclass(frozen=True)
class Mechanism:
    """One release as an accountant sees it; ``max_batch_size`` and ``num_examples`` are 0 unless the draw is truncated."""

    sampling_rate: float
    noise_multiplier: float
    max_batch_size: int = 0
    num_examples: int = 0

    @property
    def is_truncated(self) -> bool:
        """Whether the draw has a cap that can bind."""
        return self.max_batch_size > 0


Counts = tuple[tuple[Mechanism, int], ...]
"""Each distinct mechanism once, with the number of its releases, in an order that depends on nothing but the content."""


def merge(events: Iterable[Event]) -> Counts:
    """Count the releases of each distinct mechanism.

    Guarantee:
        The composition of the result has the privacy loss of the composition of ``events``:
        composition does not depend on order, and releases of the whole data set with Gaussian noise add up to a single one
        with ``noise_multiplier = (sum of 1/noise_multiplier**2) ** -0.5``, exactly.
    """
    counts: dict[Mechanism, int] = {}
    precision = 0.0
    # NUMERICS: sorted, so that the floating-point sum, and with it epsilon, does not depend on the order of the events.
    for mechanism, count in sorted((_mechanism(event) for event in events if event.num_steps), key=_sort_key):
        if mechanism.noise_multiplier > 0.0 and mechanism.sampling_rate == 1.0 and not mechanism.is_truncated:
            precision += count / mechanism.noise_multiplier / mechanism.noise_multiplier
        else:
            counts[mechanism] = counts.get(mechanism, 0) + count
    if precision > 0.0:
        counts[Mechanism(1.0, 1.0 / math.sqrt(precision))] = 1
    return tuple(sorted(counts.items(), key=_sort_key))


def without_caps(counts: Counts) -> Counts:
    """Return ``counts`` as if no draw were truncated: near the truth for a generous cap, but not a bound."""
    return tuple((Mechanism(mechanism.sampling_rate, mechanism.noise_multiplier), count) for mechanism, count in counts)


def num_releases(counts: Counts) -> int:
    """Return how many releases ``counts`` holds."""
    return sum(count for _, count in counts)


def _mechanism(event: Event) -> tuple[Mechanism, int]:
    match event.sampling:
        case Poisson():
            return Mechanism(event.sampling_rate, event.noise_multiplier), event.num_steps
        case TruncatedPoisson(max_batch_size=cap):
            size = _size(event)
            if cap >= size:  # such a cap never binds
                return Mechanism(event.sampling_rate, event.noise_multiplier), event.num_steps
            return Mechanism(event.sampling_rate, event.noise_multiplier, cap, size), event.num_steps
        case Unsampled():
            size = _size(event)
            # PRIVACY: round the expected size up, so that the number of epochs is never too small.
            batch_size = math.ceil(event.sampling_rate * size * (1.0 - 1e-12))
            epochs = count_epochs(num_steps=event.num_steps, expected_batch_size=batch_size, num_examples=size)
            return Mechanism(1.0, event.noise_multiplier), epochs
        case _:
            assert_never(event.sampling)


def _size(event: Event) -> int:
    assert event.num_examples is not None  # checked when the event was made
    return event.num_examples


def _sort_key(item: tuple[Mechanism, int]) -> tuple[float, float, int, int, int]:
    mechanism, count = item
    return mechanism.sampling_rate, mechanism.noise_multiplier, mechanism.max_batch_size, mechanism.num_examples, count


def from_history(history: Iterable[tuple[float, float, int]]) -> tuple[Event, ...]:
    """Read a history of ``(sampling_rate, noise_multiplier, num_steps)`` under Poisson sampling."""
    try:
        triples = [(rate, noise, steps) for rate, noise, steps in history]
    except (TypeError, ValueError):
        raise ConfigError(
            f"history={history!r} is not a list of triples. "
            "Each entry must be (sampling_rate, noise_multiplier, num_steps). Pass [(0.01, 1.1, 3000)] for a single run."
        ) from None
    return tuple(Event(sampling_rate=rate, noise_multiplier=noise, num_steps=steps) for rate, noise, steps in triples)
