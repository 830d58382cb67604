"""GEP: release coordinates in public subspaces, and what lies outside of them, each with a limit and noise of its own."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lowkey.boundary import Provenance, Public
from lowkey.checks import require_count, require_number
from lowkey.errors import ConfigError
from lowkey.methods.method import Start, Strategy
from lowkey.methods.pdpsgd import require_rank
from lowkey.release import ClipGroup
from lowkey.sketch import Identity, Sketch
from lowkey.sketch.eigen import leading_directions
from lowkey.sketch.residual import WithResidual, coordinates_block, residual_block


@dataclass(frozen=True, kw_only=True)
class GEP:
    r"""Perturb each gradient's embedding in the eigenspaces of public gradients, and its residual.

    Each parameter has an eigenspace of its own, with the rows of `V` as its directions.
    An example's embedding is `V g` of every parameter, clipped to `C_1` as one vector; its residual is `g - V^T V g` of every parameter,
    clipped to `C_2 = residual_ratio * C_1` as one vector.
    Parameters of no more than `rank` entries are embedded whole.

    Fields:
        public: Examples that are not protected, drawn like the private ones or from a neighbouring distribution.
        rank: Dimensions of each parameter's eigenspace; at most the number of public examples.
        refresh_every: Steps between two sets of eigenspaces, each at the weights of its step.
        residual_ratio: The limit of the residual over that of the embedding. The default is that of the authors' published command,
            which clips at 5 and 2.

    Guarantee:
        Each step is one Gaussian release with the sensitivity `clip_norm`.
        Proof: with `w = 1 / residual_ratio`, the embedding and `w` times the residual are each clipped to `clip_norm / sqrt(2)`.
        An example moves the pair by at most `sqrt(clip_norm^2 / 2 + clip_norm^2 / 2) = clip_norm`, and noise of
        `noise_multiplier * clip_norm` is on every coordinate of it.
        In the units of the gradient the limits are `C_1 = clip_norm / sqrt(2)` and `C_2 = clip_norm / (sqrt(2) w)`, and the noise is
        `s_1 = noise_multiplier * clip_norm` and `s_2 = s_1 / w`. So each part is a Gaussian mechanism with noise multiplier
        `sqrt(2) * noise_multiplier`, and together they are one with
        `1 / sqrt(C_1^2 / s_1^2 + C_2^2 / s_2^2) = noise_multiplier`.
        Public examples are not protected at all.

    References:
        [yu2021gep], Alg. 1. There a power iteration approximates the subspaces of a few groups of parameters; here they are exact, and each
        parameter is a group.

    Example:
        >>> import torch
        >>> loss = lambda model, batch: torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        >>> GEP(public=Public({"x": torch.randn(100, 8), "y": torch.zeros(100).long()}, loss), rank=50).residual_ratio
        0.4
    """

    public: Public
    rank: int
    refresh_every: int = 1
    residual_ratio: float = 0.4

    def __post_init__(self) -> None:
        for name in ("rank", "refresh_every"):
            object.__setattr__(self, name, require_count(name, getattr(self, name)))
        require_rank(self.rank, self.public)
        if not 0.0 < require_number("residual_ratio", self.residual_ratio) < math.inf:
            raise ConfigError(
                f"residual_ratio={self.residual_ratio} is not a ratio of two limits. "
                "It must be positive and finite: the limit of what lies outside the subspaces over that of what lies inside. "
                "Start with 0.4; for no residual at all use PDPSGD(sketch_first=True)."
            )

    @property
    def has_guarantee(self) -> bool:
        return True

    def start(self, start: Start) -> Strategy:
        """Become a strategy for one model."""
        embeddings = _Embeddings(self, start)
        # PRIVACY: two limits of clip_norm each would move the release by sqrt(2) times the clip norm that its noise is made for.
        groups = tuple(ClipGroup(blocks=blocks, share=math.sqrt(0.5)) for blocks in embeddings.blocks())
        return Strategy(sketching=embeddings, clip_groups=groups)


class _Embeddings:
    """The eigenspace of every parameter above the rank; smaller ones are whole."""

    def __init__(self, method: GEP, start: Start) -> None:
        self._method, self._start = method, start
        self._wide = [name for name, spec in start.specs.items() if math.prod(spec.shape) > method.rank]
        if not self._wide:
            raise ConfigError(
                f"rank={method.rank} is not below the size of any parameter among {list(start.specs)[:5]}. "
                "A subspace must be smaller than what it lies in. Use a smaller rank, or DPSGD()."
            )
        self._window = -1
        self._directions: dict[str, Tensor] = {}
        self._current: dict[str, Sketch] = {}

    def blocks(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the names of all embeddings, and of all residuals."""
        whole = self._start.specs.keys() - set(self._wide)
        return frozenset(whole | {coordinates_block(name) for name in self._wide}), frozenset(map(residual_block, self._wide))

    def sketches(self, step: int) -> Mapping[str, Sketch]:
        """Return the eigenspaces of this step's window."""
        window = (step - 1) // self._method.refresh_every
        if window != self._window:
            # PRIVACY: the bases are functions of public examples and of weights, which are functions of releases; no batch is in reach.
            gradients = functools.partial(self._start.public_gradients, self._method.public)
            self._take(window, leading_directions(gradients, [[name] for name in self._wide], self._method.rank))
        return self._current

    def _take(self, window: int, directions: Mapping[str, Tensor]) -> None:
        self._window, self._directions = window, dict(directions)
        self._current = {name: self._sketch(name) for name in self._start.specs}

    def _sketch(self, name: str) -> Sketch:
        if name not in self._directions:
            return Identity(name, self._start.specs[name].shape)
        return WithResidual(name, self._directions[name], 1.0 / self._method.residual_ratio, Provenance.PUBLIC)

    def state_dict(self) -> dict[str, object]:
        """Return the eigenspaces, which stand until their next turn."""
        return {"window": self._window, "directions": self._directions}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in eigenspaces."""
        weights = self._start.weights
        self._take(state["window"], {name: part.to(weights[name].device) for name, part in state["directions"].items()})
