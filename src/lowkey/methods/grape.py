"""DP-GRAPE: release a random sketch of each matrix gradient, and keep the optimizer's state there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lowkey.boundary import Provenance
from lowkey.checks import Word, require_count, require_member
from lowkey.errors import ConfigError
from lowkey.factors import Axis, Kind, ParameterSpec, wide_dtype
from lowkey.methods.method import Start, Strategy
from lowkey.optim import OnRefresh, Subspace
from lowkey.sketch import Channels, Distribution, Identity, OneSided, Sketch, draw_basis


class Side(Word):
    """Which side of a layer's weight is sketched."""

    INPUT = "input"
    OUTPUT = "output"
    SMALLER = "smaller"


@dataclass(frozen=True, kw_only=True)
class Grape:
    """Sketch every matrix with a random basis that is redrawn now and then.

    Fields:
        rank: Kept dimensions per matrix. Of a convolution's kernel, the nearest number of whole input channels with all their taps,
            where that is at least one and at most half of them.
        refresh_every: Steps between two draws of the basis.
        side: The side to reduce. The input side is the default, because a layer then keeps its input already reduced.
        distribution: How the basis is drawn.
        on_refresh: What becomes of the optimizer's moments on a redraw; the paper keeps them.
        sketch_embeddings: Also reduce the feature axis of embeddings, which the paper leaves whole.

    Guarantee:
        Sketched first, clipped then: the sensitivity is `clip_norm` whatever the basis is.

    References:
        [grape2025], Alg. 1 and 2. Line 13 there puts the noise after the division; here it goes on the sum.

    Example:
        >>> Grape(rank=16, refresh_every=100).side
        'input'
    """

    rank: int
    refresh_every: int = 100
    side: Side | str = Side.INPUT
    distribution: Distribution | str = Distribution.GAUSSIAN
    on_refresh: OnRefresh | str = OnRefresh.KEEP
    sketch_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in ("rank", "refresh_every"):
            require_count(name, getattr(self, name))
        for name, choices in (("side", Side), ("distribution", Distribution), ("on_refresh", OnRefresh)):
            object.__setattr__(self, name, require_member(choices, name, getattr(self, name)))

    @property
    def has_guarantee(self) -> bool:
        return True

    def start(self, start: Start) -> Strategy:
        """Become a strategy for one model."""
        bases = _RandomBases(self, start)
        return Strategy(sketching=bases, space=bases, on_refresh=OnRefresh(self.on_refresh))


class _RandomBases:
    """Random one-sided sketches for the matrices, the identity for the rest; the optimizer lives in the sketched coordinates."""

    def __init__(self, method: Grape, start: Start) -> None:
        self._method, self._start = method, start
        self._axes = {name: _axis(method, spec) for name, spec in start.specs.items()}
        self._window = -1
        self._current: dict[str, Sketch] = {}
        if all(axis is None for axis in self._axes.values()):
            raise ConfigError(
                f"rank={method.rank} leaves no matrix to sketch among {list(start.specs)[:5]}. "
                "A sketch needs a linear, convolution or embedding weight whose two sides are above the rank. "
                "Use a smaller rank, sketch_embeddings=True, or DPSGD()."
            )
        _check_rank(method.rank, start.specs, self._axes)

    def sketches(self, step: int) -> Mapping[str, Sketch]:
        """Return the bases of this step's window, which are a function of the seed and the window's number."""
        window = (step - 1) // self._method.refresh_every
        if window != self._window:
            self._window = window
            drawn: dict[tuple[object, ...], Tensor] = {}
            self._current = {name: self._draw(spec, self._axes[name], drawn) for name, spec in self._start.specs.items()}
        return self._current

    def _draw(self, spec: ParameterSpec, axis: Axis | None, drawn: dict[tuple[object, ...], Tensor]) -> Sketch:
        if axis is None:
            return Identity(spec.name, spec.shape)
        weight, rank = self._start.weights[spec.name], self._method.rank
        width = spec.matrix_shape[0 if axis is Axis.ROWS else 1]
        channels = _whole_channels(spec, axis, rank)
        if channels:
            width, rank = spec.shape[1], channels
        # Siblings that reduce axes of the same width share a basis, so that query, key and value share one product with their input.
        key = (self._start.seed, self._window, spec.owner, width, rank)
        if key not in drawn:
            drawn[key] = draw_basis(Distribution(self._method.distribution), width, rank, key).to(weight.device, wide_dtype(weight.dtype))
        if channels:
            return Channels(spec.name, spec.shape, drawn[key], Provenance.RANDOM)
        return OneSided(spec.name, spec.shape, axis, drawn[key], Provenance.RANDOM)

    def subspaces(self) -> Mapping[str, Subspace]:
        """Return every sketched matrix: its moments live in the sketch."""
        return {name: sketch for name, sketch in self._current.items() if isinstance(sketch, OneSided | Channels)}

    def state_dict(self) -> dict[str, object]:
        """Return nothing: the bases are a function of the seed and the step."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take nothing."""


def _axis(method: Grape, spec: ParameterSpec) -> Axis | None:
    rows, cols = spec.matrix_shape
    if spec.kind is Kind.OTHER or (spec.kind is Kind.EMBEDDING and not method.sketch_embeddings):
        return None
    if spec.kind is Kind.EMBEDDING:
        return Axis.COLS
    side = Side(method.side)
    if side is Side.SMALLER:
        axis = Axis.ROWS if rows <= cols else Axis.COLS
    else:
        axis = Axis.ROWS if (side is Side.INPUT) == (spec.kind is Kind.INPUT_FIRST) else Axis.COLS
    # A matrix whose other side is no wider than the rank, as a small classifier's head, has no gradient of a higher rank to sketch.
    return None if (cols if axis is Axis.ROWS else rows) <= method.rank else axis


def _whole_channels(spec: ParameterSpec, axis: Axis, rank: int) -> int:
    """Return how many input channels of a kernel to keep, each with all its taps; 0 to reduce channels and taps as one axis.

    Both have the same expected error for the same number of columns, and pixels are much cheaper to reduce than patches.
    """
    taps = math.prod(spec.shape[2:])
    channels = round(rank / taps)
    can_be_kept = axis is Axis.COLS and 1 < taps <= rank and 2 * channels * taps <= spec.matrix_shape[1]
    return channels if can_be_kept else 0


def _check_rank(rank: int, specs: Mapping[str, ParameterSpec], axes: Mapping[str, Axis | None]) -> None:
    for name, axis in axes.items():
        rows, cols = specs[name].matrix_shape
        width = rows if axis is Axis.ROWS else cols
        if axis is not None and rank > width:
            raise ConfigError(
                f"rank={rank} is above the {width} entries of the side of '{name}' ({rows} x {cols}) that it would reduce. "
                f"A sketch must not be larger than what it sketches. Use a rank of at most {width}, or the other side."
            )
