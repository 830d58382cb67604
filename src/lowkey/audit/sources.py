"""Noise sources of an audit: one that remembers what it noised, and one that plays it back."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lowkey.release import SeededNoise

Draw = tuple[int, int]
"""The step and the index that name a draw."""


class RecordingNoise:
    """Seeded noise that remembers every noised sum.

    Fields:
        sums: The noised sums, before any division.
        before_draw: Called before each draw, with its step.

    Guarantee:
        None: for audits only.
    """

    def __init__(self, seed: int) -> None:
        self._seeded = SeededNoise(seed)
        self.sums: dict[Draw, Tensor] = {}
        self.before_draw: Callable[[int], None] = lambda step: None

    @property
    def has_guarantee(self) -> bool:
        """False."""
        return False

    @property
    def description(self) -> str:
        """One line for the privacy statement."""
        return "NON-PRIVATE: recorded by an audit"

    def normal(self, like: Tensor, std: float, *, step: int, index: int) -> Tensor:
        """Draw noise with the shape of `like`."""
        noise = torch.zeros_like(like)
        self.add_(noise, std, step=step, index=index)
        return noise

    def add_(self, total: Tensor, std: float, *, step: int, index: int) -> None:
        """Add noise, and remember the result."""
        self.before_draw(step)
        self._seeded.add_(total, std, step=step, index=index)
        self.sums[step, index] = total.clone()


class PlaybackNoise:
    """Replaces every sum by one that was recorded, so that a run without examples makes the releases of a run with them.

    Fields:
        missing: Draws of which there is no record, or whose record was not asked for.

    Guarantee:
        None: for audits only.
    """

    def __init__(self, sums: Mapping[Draw, Tensor]) -> None:
        self._sums = sums
        self.missing = set(sums)

    @property
    def has_guarantee(self) -> bool:
        """False."""
        return False

    @property
    def description(self) -> str:
        """One line for the privacy statement."""
        return "NON-PRIVATE: played back by an audit"

    def normal(self, like: Tensor, std: float, *, step: int, index: int) -> Tensor:
        """Return a recorded sum with the shape of `like`."""
        noise = torch.zeros_like(like)
        self.add_(noise, std, step=step, index=index)
        return noise

    def add_(self, total: Tensor, std: float, *, step: int, index: int) -> None:
        """Overwrite `total` by what was recorded under this name."""
        found = self._sums.get((step, index))
        if found is None or found.shape != total.shape:
            self.missing.add((step, index))
        else:
            self.missing.discard((step, index))
            total.copy_(found)
