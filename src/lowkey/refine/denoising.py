"""Shrink the matrices of each release, or of a moving average of releases."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from lowkey.boundary import Released
from lowkey.refine.average import MovingAverage
from lowkey.refine.shrink import shrink_all


class Denoising:
    """Shrinks some blocks of each release and leaves the others.

    Args:
        names: The blocks to shrink; matrices.
        kappa: As for `shrink`.
        norm_correction: As for `shrink`.
        average: Shrink this moving average of the blocks in their place; None to shrink each release by itself.

    Guarantee:
        Reads released values and their public noise level only, so it is post-processing; what it remembers is made of releases too.
    """

    def __init__(self, names: Collection[str], *, kappa: float, norm_correction: bool, average: MovingAverage | None = None) -> None:
        self._names = tuple(names)
        self._kappa, self._norm_correction = kappa, norm_correction
        self._average = average

    @torch.no_grad()
    def refine(self, released: Released) -> Released:
        """Return the release with its matrices shrunk."""
        blocks, noise_std = self._noisy(released)
        # PRIVACY: the level comes from the release, not from its content; what is detected and kept follows from noised values alone.
        shrunk = shrink_all(list(blocks.values()), noise_std, kappa=self._kappa, norm_correction=self._norm_correction)
        return dataclasses.replace(released, blocks={**released.blocks, **dict(zip(blocks, shrunk, strict=True))})

    def _noisy(self, released: Released) -> tuple[Mapping[str, Tensor], float]:
        """Return the matrices to shrink, and the noise that is in each of their entries."""
        blocks = {name: released.blocks[name] for name in self._names}
        if self._average is None:
            return blocks, released.noise_std
        self._average.add(blocks, released.noise_std)
        return self._average.means(), self._average.noise_std

    def state_dict(self) -> dict[str, object]:
        """Return the state of the average, if there is one."""
        return {} if self._average is None else self._average.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        if self._average is not None:
            self._average.load_state_dict(state)
