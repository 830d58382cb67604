"""RPDP-SGD: project the released gradient on random directions. The baseline that PDP-SGD is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowkey.boundary import Provenance, Released
from lowkey.checks import require_count
from lowkey.errors import ConfigError
from lowkey.factors import ParameterSpec, wide_dtype
from lowkey.methods.method import FullGradient, Start, Strategy
from lowkey.refine.project import project_randomly
from lowkey.sketch import Shared, Sketch
from lowkey.sketch.shared import draw_directions


@dataclass(frozen=True, kw_only=True)
class RPDPSGD:
    """Keep of each step what lies along Gaussian directions over the whole parameter vector.

    Fields:
        rank: How many directions; the paper uses 800 for some 26,000 coordinates.
        refresh_every: Steps between two draws.
        start_step: The first step that is projected; those before are DP-SGD's.
        sketch_first: Clip the coordinates along the directions in place of the full gradient, and release them alone. The paper does not.

    Guarantee:
        As for `PDPSGD`: the directions are a function of a public seed.

    Cost:
        `project_randomly` draws the directions when they are needed and never holds them all; `sketch_first` has to hold them.

    References:
        [zhou2021pdp], section 4. It names a Gaussian projector and neither its scale nor whether it is redrawn. Here the entries have
        variance `1 / rank`, which makes the projection unbiased, and a step size absorbs any other; it is redrawn as often as Alg. 1
        computes its eigenspace, in every step.

    Example:
        >>> RPDPSGD(rank=800)
        RPDPSGD(rank=800, refresh_every=1, start_step=1, sketch_first=False)
    """

    rank: int
    refresh_every: int = 1
    start_step: int = 1
    sketch_first: bool = False

    def __post_init__(self) -> None:
        for name in ("rank", "refresh_every", "start_step"):
            object.__setattr__(self, name, require_count(name, getattr(self, name)))

    @property
    def has_guarantee(self) -> bool:
        return True

    def start(self, start: Start) -> Strategy:
        """Become a strategy for one model."""
        width = sum(weight.numel() for weight in start.weights.values())
        if self.rank > width:
            raise ConfigError(
                f"rank={self.rank} is above the {width} coordinates that are trained. "
                "More directions than coordinates reduce nothing. Use a smaller rank, or DPSGD()."
            )
        subspace = _RandomSubspace(self, start)
        return Strategy(sketching=subspace, refining=subspace)


class _RandomSubspace:
    """Directions that are a function of the seed and of the step's window, so there is nothing to store."""

    def __init__(self, method: RPDPSGD, start: Start) -> None:
        self._method, self._start = method, start
        self._full = FullGradient(start.specs)
        self._step = 0
        self._window = -1
        self._shared: dict[str, Sketch] = {}

    def sketches(self, step: int) -> Mapping[str, Sketch]:
        """Return the identity, or the directions of this step's window."""
        self._step = step
        if not self._method.sketch_first or step < self._method.start_step:
            return self._full.sketches(step)
        if self._window != self._key[0]:
            self._window = self._key[0]
            self._shared = {name: self._draw(spec) for name, spec in self._start.specs.items()}
        return self._shared

    def refine(self, released: Released) -> Released:
        """Project, unless the release has been sketched or the start is yet to come."""
        if self._method.sketch_first or self._step < self._method.start_step:
            return released
        return project_randomly(released, self._method.rank, self._key)

    @property
    def _key(self) -> tuple[int, str, int]:
        return ((self._step - self._method.start_step) // self._method.refresh_every, "directions", self._start.seed)

    def _draw(self, spec: ParameterSpec) -> Shared:
        weight, rank = self._start.weights[spec.name], self._method.rank
        drawn = draw_directions(spec.shape, range(rank), rank, (*self._key, spec.name))
        return Shared(spec.name, drawn.to(weight.device, wide_dtype(weight.dtype)), Provenance.RANDOM)

    def state_dict(self) -> dict[str, object]:
        """Return nothing: the directions are a function of the seed and the step."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take nothing."""
