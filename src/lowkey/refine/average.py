"""A moving average of releases that knows how much noise is in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class MovingAverage:
    """Averages the releases of some blocks, later ones with more weight.

    After `t` releases the mean is `(1 - decay) sum_j decay^(t - j) release_j / (1 - decay^t)`.
    With noise of one level `s` in each of them, that in the mean is `s sqrt((1 - decay) / (1 + decay) (1 + decay^t) / (1 - decay^t))`:
    `s` after the first, and down to `s sqrt((1 - decay) / (1 + decay))` in the long run.

    Args:
        decay: The share of the average that a step keeps, in [0, 1).
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._sums: dict[str, Tensor] = {}
        self._weight = self._variance = 0.0

    @torch.no_grad()
    def add(self, blocks: Mapping[str, Tensor], noise_std: float) -> None:
        """Take one release, the same blocks each time; nothing of it is kept but its share of the sums."""
        fresh = 1.0 - self._decay
        for name, block in blocks.items():
            total = self._sums.get(name)
            self._sums[name] = block * fresh if total is None else total.to(block.device).mul_(self._decay).add_(block, alpha=fresh)
        self._weight = self._decay * self._weight + fresh
        # PRIVACY: each release has noise of its own, so variances add up; this level is public, as those of the releases are.
        self._variance = self._decay**2 * self._variance + (fresh * noise_std) ** 2

    def means(self) -> dict[str, Tensor]:
        """Return the weighted mean of what was added, in new tensors."""
        return {name: total / self._weight for name, total in self._sums.items()}

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on each coordinate of a mean."""
        return math.sqrt(self._variance) / self._weight

    def state_dict(self) -> dict[str, object]:
        """Return the sums, their weight and their variance."""
        return {"sums": dict(self._sums), "weight": self._weight, "variance": self._variance}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, with copies of its tensors."""
        self._sums = {name: total.clone() for name, total in state["sums"].items()}
        self._weight, self._variance = state["weight"], state["variance"]
