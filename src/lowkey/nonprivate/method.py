"""Ordinary training in the same loop."""

from __future__ import annotations

from dataclasses import dataclass

from lowkey.methods.method import Plain, Start, Strategy


@dataclass(frozen=True, kw_only=True)
class NonPrivate:
    """Release the exact mean gradient: no clipping, no noise, ε = ∞.

    The plan's noise multiplier and the clip norm do not apply, and the privacy statement says so.

    Guarantee:
        None.

    Example:
        >>> NonPrivate().has_guarantee
        False
    """

    @property
    def has_guarantee(self) -> bool:
        return False

    def start(self, start: Start) -> Strategy:
        """Become a strategy for one model."""
        return Plain(start.specs)
