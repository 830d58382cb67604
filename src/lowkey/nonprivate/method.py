"""Ordinary training in the same loop."""

from __future__ import annotations

from dataclasses import dataclass, field

from lowkey.errors import ConfigError
from lowkey.methods import DPSGD, Method
from lowkey.methods.method import Start, Strategy


@dataclass(frozen=True, kw_only=True)
class NonPrivate:
    """Run a method without clipping and without noise: ε = ∞.

    The plan's noise multiplier and the clip norm do not apply, and the privacy statement says so.

    Fields:
        method: What to run; by default the exact mean gradient steps the weights.

    Guarantee:
        None.

    Example:
        >>> NonPrivate().has_guarantee
        False
    """

    method: Method = field(default_factory=DPSGD)

    def __post_init__(self) -> None:
        # Users pass what they like, whatever the annotation says.
        if isinstance(self.method, type) or not hasattr(self.method, "start"):
            raise ConfigError(
                f"method={self.method!r} is not a method. It is what runs without privacy. Pass an instance, as lk.Grape(rank=16)."
            )

    @property
    def has_guarantee(self) -> bool:
        return False

    def start(self, start: Start) -> Strategy:
        """Become the strategy of the method within."""
        return self.method.start(start)
