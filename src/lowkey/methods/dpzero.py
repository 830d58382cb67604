"""DPZero: release one number a step, each example's slope along a random direction, from two forward passes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowkey.boundary import Provenance
from lowkey.errors import ConfigError
from lowkey.methods.method import Start, Strategy
from lowkey.sketch import Sketch, draw_signs
from lowkey.sketch.shared import Shared


@dataclass(frozen=True, kw_only=True)
class DPZero:
    """Clip, sum and noise the slope of each example's loss along a public random direction, and step along it.

    No backward pass is run, so `Private.backward` takes a function: `private.backward(lambda: losses_of(model, batch))`.

    Fields:
        scale: Half the distance between the two weights at which each loss is taken, in units of the direction's entries.

    Guarantee:
        Each step is one Gaussian release of one number, in which an example's share is at most the clip norm.
        The direction is a function of a public seed; noise has keys of its own.

    References:
        [zhang2024dpzero], Alg. 2, on random signs, whose vector is as long as the paper's directions on the sphere; [grape2025], Table 3.

    Example:
        >>> DPZero(scale=1e-3)
        DPZero(scale=0.001)
    """

    scale: float = 1e-3

    def __post_init__(self) -> None:
        # Users pass what they like, whatever the annotation says.
        if not isinstance(self.scale, int | float) or isinstance(self.scale, bool) or not 0.0 < self.scale < math.inf:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"scale={self.scale!r} is no distance. It must be above zero and finite: two losses are taken that far to either side. "
                "Start with scale=1e-3."
            )

    @property
    def has_guarantee(self) -> bool:
        return True

    def start(self, start: Start) -> Strategy:
        """Become a strategy for one model."""
        return Strategy(sketching=_Directions(start), probe=float(self.scale))


class _Directions:
    """One vector of signs a step over all parameters together, drawn anew from the public seed."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._step = 0
        self._current: dict[str, Sketch] = {}

    def sketches(self, step: int) -> Mapping[str, Sketch]:
        """Return the direction of `step`, which is a function of the seed and the step."""
        if step != self._step:
            self._step = step
            self._current = {name: self._draw(name, step) for name in self._start.specs}
        return self._current

    def _draw(self, name: str, step: int) -> Sketch:
        weight = self._start.weights[name]
        # PRIVACY: the direction's key holds public facts only; were it the noise's, the noise could be divided out.
        direction = draw_signs((1, *weight.shape), weight, (self._start.seed, "direction", step, name))
        return Shared(name, direction, Provenance.RANDOM)

    def state_dict(self) -> dict[str, object]:
        """Return nothing: directions are a function of the seed and the step."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take nothing."""
