"""RGP: release what each gradient holds in the span of a few columns and rows that the weights' own history points to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, assert_never

import torch
from torch import Tensor

from lowkey.boundary import Provenance
from lowkey.checks import Word, require_count, require_member
from lowkey.errors import ConfigError
from lowkey.factors import Axis, ParameterSpec, wide_dtype
from lowkey.methods.matrices import input_axis, wide_matrices
from lowkey.methods.method import Start, Strategy
from lowkey.sketch import Identity, OneSided, Sketch
from lowkey.sketch.carriers import Carriers, Core
from lowkey.sketch.power_method import draw_carriers, draw_orthonormal, power_iteration


class TrainedCarriers(Word):
    """Which carriers have a gradient: the left one's reduces a layer's input, the right one's its output."""

    BOTH = "both"
    LEFT = "left"
    RIGHT = "right"


class CarrierBasis(Word):
    """Where carriers come from."""

    HISTORY = "history"
    WEIGHT = "weight"
    RANDOM = "random"


@dataclass(frozen=True, kw_only=True)
class RGP:
    """Sketch every matrix from both sides, with bases that follow the update so far.

    Fields:
        rank: Kept dimensions of each side.
        power_iterations: Iterations of the power method in each step.
        warmup_steps: Steps in which history is too short, and the weight itself is followed.
        carriers: Train both, or one alone, which is then a one-sided sketch.
        isometric: Free the right carrier's gradient of what the left one's holds before it is clipped; the decoded noise stays the same.
        basis: Follow the history W_t - W_0, the weight W_t, or nothing (fresh random bases in each step).
        warm_start: Let the power method go on from the carriers before, in place of a random start in each step.

    Guarantee:
        Sketched first, clipped then: the sensitivity is `clip_norm` whatever the carriers are.

    Assumes:
        The weights that training starts from are public or random. If they were tuned on the same records without privacy, no claim holds.

    References:
        [yu2021rgp], Alg. 1 and 2.

    Example:
        >>> RGP(rank=8, carriers="left").carriers
        'left'
    """

    rank: int
    power_iterations: int = 1
    warmup_steps: int = 10
    carriers: TrainedCarriers | str = TrainedCarriers.BOTH
    isometric: bool = False
    basis: CarrierBasis | str = CarrierBasis.HISTORY
    warm_start: bool = False

    def __post_init__(self) -> None:
        if self.warmup_steps == 0:
            raise ConfigError(
                "warmup_steps=0 leaves the first step without carriers. The history W_t - W_0 is zero there and points nowhere. "
                "Use at least 1."
            )
        for name in ("rank", "power_iterations", "warmup_steps"):
            require_count(name, getattr(self, name))
        object.__setattr__(self, "carriers", require_member(TrainedCarriers, "carriers", self.carriers))
        object.__setattr__(self, "basis", require_member(CarrierBasis, "basis", self.basis))
        if self.isometric and self.carriers is not TrainedCarriers.BOTH:
            raise ConfigError(
                f"isometric=True was given with carriers={TrainedCarriers(self.carriers).value!r}. One carrier alone holds nothing twice, "
                "so there is nothing to take away. Leave isometric out, or train both carriers."
            )

    @property
    def has_guarantee(self) -> bool:
        return True

    def start(self, start: Start) -> Strategy:
        """Become a strategy for one model."""
        return Strategy(sketching=_HistoricalCarriers(self, start))


class _HistoricalCarriers:
    """Finds the carriers of each matrix anew in every step; everything else is left whole.

    Guarantee:
        Reads weights and the seed only, which are functions of releases and public randomness.
    """

    def __init__(self, method: RGP, start: Start) -> None:
        self._method, self._start = method, start
        self._names = wide_matrices(start.specs, method.rank)
        self._sketches: dict[str, Sketch] = {name: Identity(name, spec.shape) for name, spec in start.specs.items()}
        keeps = method.basis is CarrierBasis.HISTORY
        # PRIVACY: W_0 is what training began with; after that, every weight is a function of releases.
        self._first = {name: start.weights[name].detach().clone() for name in self._names if keeps}
        self._bases: dict[str, tuple[Tensor, Tensor]] = {}
        self._step = 0

    @torch.no_grad()
    def sketches(self, step: int) -> Mapping[str, Sketch]:
        """Return the carriers for `step`, found from the weights as they stand before it."""
        if step != self._step:
            self._take({name: self._find(name, step) for name in self._names}, step)
        return self._sketches

    def _find(self, name: str, step: int) -> tuple[Tensor, Tensor]:
        method = self._method
        if method.basis is CarrierBasis.RANDOM:
            return self._draw(name, step)
        left, right = self._bases[name] if name in self._bases else self._draw(name, step)
        if not method.warm_start:
            _, right = self._placed(name, left, draw_orthonormal(right.shape[1], method.rank, (*self._key(name, step), "right")).T)
        return power_iteration(self._followed(name, step), left, right, method.power_iterations)

    def _draw(self, name: str, step: int) -> tuple[Tensor, Tensor]:
        return self._placed(name, *draw_carriers(*self._start.specs[name].matrix_shape, self._method.rank, self._key(name, step)))

    def _key(self, name: str, step: int) -> tuple[object, ...]:
        return (self._start.seed, "carriers", name, step)

    def _placed(self, name: str, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Bring carriers to the weight's device, in the precision that sums are taken in."""
        weight = self._start.weights[name]
        dtype = wide_dtype(weight.dtype)
        return left.to(weight.device, dtype), right.to(weight.device, dtype)

    def _followed(self, name: str, step: int) -> Tensor:
        """Return the matrix whose leading directions are wanted."""
        weight = self._start.weights[name].detach().flatten(1)
        weight = weight.to(wide_dtype(weight.dtype))
        if self._method.basis is CarrierBasis.HISTORY and step > self._method.warmup_steps:
            # NUMERICS: the difference comes first; two products of nearly equal weights would cancel to their rounding.
            return weight - self._first[name].flatten(1)
        return weight

    def _take(self, bases: dict[str, tuple[Tensor, Tensor]], step: int) -> None:
        # The sketches of an earlier step may still be looked at, so theirs is another dictionary.
        self._bases, self._step = bases, step
        self._sketches = {**self._sketches, **{name: self._sketch(self._start.specs[name], *pair) for name, pair in bases.items()}}

    def _sketch(self, spec: ParameterSpec, left: Tensor, right: Tensor) -> Sketch:
        method = self._method
        provenance = Provenance.RANDOM if method.basis is CarrierBasis.RANDOM else Provenance.HISTORICAL
        trained = TrainedCarriers(method.carriers)
        if trained is TrainedCarriers.BOTH:
            core = Core.LEFT_ONLY if method.isometric else Core.SUBTRACTED
            return Carriers(name=spec.name, shape=spec.shape, left=left, right=right, provenance=provenance, core=core)
        axis = _reduced_axis(trained, spec)
        return OneSided(spec.name, spec.shape, axis, right.T if axis is Axis.COLS else left, provenance)

    def state_dict(self) -> dict[str, object]:
        """Return the first weights and the carriers of the step under way, from which the next ones go on."""
        return {"step": self._step, "first": dict(self._first), "carriers": {name: list(pair) for name, pair in self._bases.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self._first = {name: value.to(self._start.weights[name]) for name, value in state["first"].items()}
        self._take({name: self._placed(name, *pair) for name, pair in state["carriers"].items()}, state["step"])


def _reduced_axis(trained: TrainedCarriers, spec: ParameterSpec) -> Axis:
    """Return the axis along which the one trained carrier's gradient is narrow."""
    match trained:
        case TrainedCarriers.LEFT:
            return input_axis(spec)
        case TrainedCarriers.RIGHT:
            return input_axis(spec).other
        case TrainedCarriers.BOTH:
            raise ValueError("both carriers reduce both axes")
        case _:
            assert_never(trained)
