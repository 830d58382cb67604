"""What a method is: a frozen description, and the strategy that it becomes for one model.

A new method is one file here, one page in `docs/methods`, a changelog entry, an export and a row in the contract table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lowkey.boundary import Released
from lowkey.factors import ParameterSpec
from lowkey.optim import OnRefresh
from lowkey.sketch import Identity, Sketch
from lowkey.sketch.sketch import Subspace


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a strategy starts from: public facts and public randomness, no data.

    Fields:
        specs: The trainable parameters.
        weights: Their values; later ones are functions of releases, so a strategy may read them at any time.
        seed: Names every random basis; public, and stored with checkpoints.
    """

    specs: Mapping[str, ParameterSpec]
    weights: Mapping[str, Tensor]
    seed: int


class Strategy(Protocol):
    """A method at work on one model.

    Life cycle: `sketches(1)`, then for every step `refine` and `sketches(step + 1)`.

    Guarantee:
        No call receives private data: a strategy sees weights and releases only.
    """

    on_refresh: OnRefresh

    def sketches(self, step: int) -> Mapping[str, Sketch]:
        """Return each parameter's sketch for `step`; the same objects as before where nothing changed."""
        ...

    def subspaces(self, sketches: Mapping[str, Sketch]) -> Mapping[str, Subspace]:
        """Return the sketches in whose coordinates the optimizer keeps its state."""
        ...

    def refine(self, released: Released) -> Released:
        """Improve a release: post-processing."""
        ...

    def state_dict(self) -> dict[str, object]:
        """Return what a resumed run needs besides the method, the weights and the seed."""
        ...

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from a state."""
        ...


class Method(Protocol):
    """A frozen, keyword-only dataclass that describes a way to train."""

    @property
    def has_guarantee(self) -> bool:
        """Whether training with it is private."""
        ...

    def start(self, start: Start) -> Strategy:
        """Become a strategy for one model.

        Raises:
            ConfigError: The method does not fit the model.
        """
        ...


class Plain:
    """The strategy without a sketch or a refinement; also what other strategies build on by holding one."""

    on_refresh = OnRefresh.KEEP

    def __init__(self, specs: Mapping[str, ParameterSpec]) -> None:
        self._sketches = {name: Identity(name, spec.shape) for name, spec in specs.items()}

    def sketches(self, step: int) -> Mapping[str, Sketch]:
        """Return the identity for every parameter."""
        return self._sketches

    def subspaces(self, sketches: Mapping[str, Sketch]) -> Mapping[str, Subspace]:
        """Return none: the optimizer steps the weights."""
        return {}

    def refine(self, released: Released) -> Released:
        """Return the release as it is."""
        return released

    def state_dict(self) -> dict[str, object]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Take nothing."""
