"""What a method is: a frozen description that becomes a strategy, which fills in the words of the sentence for one model.

    sample → factors → SKETCH → clip → sum → noise ║ REFINE → optimizer, decode in a SPACE → weights

A new method is one file here, one page in `docs/methods`, a changelog entry, an export and a row in the contract table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from lowkey.boundary import Public, Released
from lowkey.factors import ParameterSpec
from lowkey.optim import OnRefresh, Subspace
from lowkey.release import ClipGroup
from lowkey.sketch import Identity, Sketch

PublicGradients = Callable[[Public], Iterator[Mapping[str, Tensor]]]
"""Gives each public example's gradient at the weights of the moment, `(examples, *shape)` by parameter, a few examples at a time."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a strategy starts from: public facts, public randomness and what was declared public.

    Fields:
        specs: The trainable parameters.
        weights: Their values; later ones are functions of releases, so a strategy may read them at any time.
        seed: Names every random basis; public, and stored with checkpoints.
        public_gradients: Takes the gradients of examples that the user declared public.
    """

    specs: Mapping[str, ParameterSpec]
    weights: Mapping[str, Tensor]
    seed: int
    public_gradients: PublicGradients


class Stateful(Protocol):
    """A part of a strategy that a resumed run must find as it was."""

    def state_dict(self) -> dict[str, object]:
        """Return what a resumed run needs besides the method, the weights and the seed."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        ...


class Sketching(Stateful, Protocol):
    """Chooses the linear map of each parameter's gradient.

    Guarantee:
        No call receives private data: the maps of a step are fixed before its batch is seen.
    """

    def sketches(self, step: int) -> Mapping[str, Sketch]:
        """Return each parameter's sketch for `step`, counted from 1; the same objects as before where nothing changed.

        A parameter without a sketch is not trained.
        """
        ...


class Refining(Stateful, Protocol):
    """Improves a release: post-processing, which may remember earlier releases.

    A release's tensors are reused after the step, so what is remembered is a copy.
    """

    def refine(self, released: Released) -> Released:
        """Return what the optimizer is to follow; called once a step."""
        ...


class Space(Stateful, Protocol):
    """Says in which coordinates the optimizer keeps its state."""

    def subspaces(self) -> Mapping[str, Subspace]:
        """Return the parameters that are not stepped themselves, with what is stepped in their place.

        Asked at the start and after every refinement and every change of sketches; names stay, objects change where their basis has.
        """
        ...


class AsReleased:
    """The refinement that changes nothing."""

    def refine(self, released: Released) -> Released:
        """Return the release as it is."""
        return released

    def state_dict(self) -> dict[str, object]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take nothing."""


class InWeights:
    """The space of the weights themselves."""

    def subspaces(self) -> Mapping[str, Subspace]:
        """Return none."""
        return {}

    def state_dict(self) -> dict[str, object]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take nothing."""


class FullGradient:
    """The identity for every parameter."""

    def __init__(self, specs: Mapping[str, ParameterSpec]) -> None:
        self._sketches = {name: Identity(name, spec.shape) for name, spec in specs.items()}

    def sketches(self, step: int) -> Mapping[str, Sketch]:
        """Return the same identities in every step."""
        return self._sketches

    def state_dict(self) -> dict[str, object]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take nothing."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A method at work on one model: what it says for each word that is its to choose.

    Fields:
        sketching: The linear maps, fixed before each batch.
        refining: What becomes of a release before the optimizer sees it.
        space: Where the optimizer keeps its state.
        on_refresh: What becomes of that state when its basis changes.
        clip_groups: Blocks that are clipped apart, each with its share of the clip norm; none for one joint norm.
        probe: Half the distance between the two weights at which a zeroth-order method takes each loss; None to differentiate.
    """

    sketching: Sketching
    refining: Refining = field(default_factory=AsReleased)
    space: Space = field(default_factory=InWeights)
    on_refresh: OnRefresh = OnRefresh.KEEP
    clip_groups: tuple[ClipGroup, ...] = ()
    probe: float | None = None

    def state_dict(self) -> dict[str, object]:
        """Return the state of every part, one object once."""
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        for name, part in self._parts().items():
            part.load_state_dict(state[name])

    def _parts(self) -> dict[str, Stateful]:
        parts: dict[int, tuple[str, Stateful]] = {}
        for name, part in (("sketching", self.sketching), ("refining", self.refining), ("space", self.space)):
            parts.setdefault(id(part), (name, part))
        return dict(parts.values())


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
