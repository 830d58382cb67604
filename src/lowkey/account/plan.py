"""What a run may release, fixed before it starts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from lowkey.account.epsilon import Accountant, Bound, compose
from lowkey.account.events import Event
from lowkey.account.sampling import Poisson, Sampling, TruncatedPoisson, Unsampled
from lowkey.account.statement import Statement
from lowkey.checks import require_count, require_delta, require_noise_multiplier, require_number
from lowkey.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much noise, how many releases, and who takes part.

    Fields:
        noise_multiplier: Noise standard deviation over the clip norm; 0 is allowed and makes ``epsilon`` infinite.
        delta: The failure probability; at most ``1 / num_examples``.
        num_examples: Size of the data set, which is public.
        expected_batch_size: Mean of the batch size, and the divisor of every release.
        num_steps: How many releases are allowed.
        sampling: Who takes part in a step.

    Raises:
        ConfigError: If a field cannot mean what it says.

    Guarantee:
        A run that makes at most ``num_steps`` releases as planned is ``(epsilon, delta)``-DP for adding or removing one example.

    Example:
        >>> plan = Plan(noise_multiplier=1.0, delta=1e-5, num_examples=100, expected_batch_size=100, num_steps=1)
        >>> round(plan.epsilon, 3)
        4.377
    """

    noise_multiplier: float
    delta: float
    num_examples: int
    expected_batch_size: int
    num_steps: int
    sampling: Sampling = field(default_factory=Poisson)

    def __post_init__(self) -> None:
        require_noise_multiplier(self.noise_multiplier)
        check_facts(
            delta=self.delta,
            num_examples=self.num_examples,
            expected_batch_size=self.expected_batch_size,
            num_steps=self.num_steps,
            sampling=self.sampling,
        )

    @property
    def sampling_rate(self) -> float:
        """The probability that an example joins a step."""
        return self.expected_batch_size / self.num_examples

    @cached_property
    def bound(self) -> Bound:
        """The bound on all planned releases, computed once."""
        return self.bound_after(self.num_steps)

    @property
    def epsilon(self) -> float:
        """The epsilon of all planned releases."""
        return self.bound.epsilon

    @property
    def accountant(self) -> Accountant:
        """Which analysis proved ``epsilon``."""
        return self.bound.accountant

    def epsilon_after(self, num_steps: int) -> float:
        """Return the epsilon of ``num_steps`` releases of this kind; more than planned may be asked for."""
        return self.bound_after(num_steps).epsilon

    def bound_after(self, num_steps: int) -> Bound:
        """Return the bound on ``num_steps`` releases of this kind."""
        return compose([self.event(num_steps)], self.delta)

    def event(self, num_steps: int) -> Event:
        """Return ``num_steps`` releases of this kind, in the terms that compose."""
        return Event(
            sampling_rate=self.sampling_rate,
            noise_multiplier=float(self.noise_multiplier),
            num_steps=num_steps,
            sampling=self.sampling,
            num_examples=self.num_examples,
        )

    def statement(self, num_steps: int | None = None) -> Statement:
        """Say what the plan promises, or what holds after ``num_steps`` of its releases."""
        made = self.num_steps if num_steps is None else num_steps
        bound = self.bound if made == self.num_steps else self.bound_after(made)
        return Statement(
            epsilon=bound.epsilon,
            delta=self.delta,
            accountant=bound.accountant,
            sampling=self.sampling,
            num_steps=made,
            num_planned_steps=self.num_steps,
            sampling_rate=self.sampling_rate,
            noise_multiplier=self.noise_multiplier,
            expected_batch_size=self.expected_batch_size,
            num_examples=self.num_examples,
        )

    def with_noise(self, noise_multiplier: float) -> Plan:
        """Return the plan with another noise multiplier."""
        return replace(self, noise_multiplier=noise_multiplier)


def check_facts(*, delta: float, num_examples: int, expected_batch_size: int, num_steps: int, sampling: Sampling) -> None:
    """Check everything of a plan but its noise, with one clear error.

    Raises:
        ConfigError: If a number cannot mean what it says.
    """
    require_delta(delta)
    require_count("num_examples", num_examples)
    _check_batch_size(expected_batch_size, num_examples)
    require_count("num_steps", num_steps)
    if delta * num_examples > 1.0 + 1e-9:
        raise ConfigError(
            f"delta={delta:g} is above 1/num_examples={1.0 / num_examples:.3g}. "
            "At such a delta, publishing a random example whole would count as private. Use delta=1e-5 or less, well below 1/num_examples."
        )
    _check_sampling(sampling, expected_batch_size)


def _check_batch_size(expected_batch_size: int, num_examples: int) -> None:
    if isinstance(expected_batch_size, float) and 0.0 < require_number("expected_batch_size", expected_batch_size) < 1.0:
        raise ConfigError(
            f"expected_batch_size={expected_batch_size} looks like a sampling rate. "
            f"It must be a number of examples. Did you mean expected_batch_size={max(1, round(expected_batch_size * num_examples))}?"
        )
    require_count("expected_batch_size", expected_batch_size)
    if expected_batch_size > num_examples:
        raise ConfigError(
            f"expected_batch_size={expected_batch_size} exceeds num_examples={num_examples}. "
            "The sampling rate would pass 1. Did you swap the two?"
        )


def _check_sampling(sampling: object, expected_batch_size: int) -> None:
    if not isinstance(sampling, Poisson | TruncatedPoisson | Unsampled):
        raise ConfigError(
            f"sampling={sampling!r} has no accountant. It must be Poisson(), TruncatedPoisson(max_batch_size=...) or Unsampled(). "
            "Use Poisson() with poisson_batches, or Unsampled() for a shuffled loader."
        )
    if isinstance(sampling, TruncatedPoisson) and sampling.max_batch_size < expected_batch_size:
        raise ConfigError(
            f"max_batch_size={sampling.max_batch_size} is below expected_batch_size={expected_batch_size}. "
            "Most draws would be truncated, which costs more privacy than sampling saves. "
            f"Use TruncatedPoisson.from_expected({expected_batch_size})."
        )
