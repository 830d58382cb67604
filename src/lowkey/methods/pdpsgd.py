"""PDP-SGD: project the released gradient on the leading directions of public gradients."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lowkey.boundary import Provenance, Public, Released
from lowkey.checks import require_count
from lowkey.errors import ConfigError
from lowkey.methods.method import FullGradient, Start, Strategy
from lowkey.refine.project import project
from lowkey.sample.microbatch import batch_size
from lowkey.sketch import Shared, Sketch
from lowkey.sketch.eigen import leading_directions


@dataclass(frozen=True, kw_only=True)
class PDPSGD:
    """Keep of each step what lies in the top eigenspace of public examples' gradients.

    Fields:
        public: Examples that are not protected, 50 to 200 of them, drawn like the private ones.
        rank: Dimensions of the eigenspace, over all trained coordinates together; at most the number of public examples.
        refresh_every: Steps between two eigenspaces, each at the weights of its step.
        start_step: The first step that is projected; those before are DP-SGD's.
        sketch_first: Clip the coordinates in the eigenspace in place of the full gradient, and release them alone. The paper does not.

    Guarantee:
        Each step is one Gaussian release of clipped sums: of full gradients, whose projection is post-processing, or of coordinates
        in a basis that was fixed before the batch.
        Public examples are not protected at all.

    References:
        [zhou2021pdp], Alg. 1. There Lanczos steps over all coordinates find the eigenspace, and k steps of it do not converge; here it
        follows exactly from the Gram matrix of the public gradients.

    Example:
        >>> import torch
        >>> loss = lambda model, batch: torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        >>> PDPSGD(public=Public({"x": torch.randn(100, 8), "y": torch.zeros(100).long()}, loss), rank=50).refresh_every
        1
    """

    public: Public
    rank: int
    refresh_every: int = 1
    start_step: int = 1
    sketch_first: bool = False

    def __post_init__(self) -> None:
        for name in ("rank", "refresh_every", "start_step"):
            object.__setattr__(self, name, require_count(name, getattr(self, name)))
        require_rank(self.rank, self.public)

    @property
    def has_guarantee(self) -> bool:
        return True

    def start(self, start: Start) -> Strategy:
        """Become a strategy for one model."""
        subspace = _PublicSubspace(self, start)
        return Strategy(sketching=subspace, refining=subspace)


def require_rank(rank: int, public: Public) -> None:
    """Check that public examples can have as many directions as are asked for.

    Raises:
        ConfigError: They are fewer.
    """
    if not isinstance(public, Public):  # pyright: ignore[reportUnnecessaryIsInstance] # reason: users pass what they like
        raise ConfigError(
            f"public is a {type(public).__name__}. The examples that give the subspace must be declared, for nothing protects them. "
            "Pass lk.Public(examples, loss)."
        )
    count = batch_size(public.examples)
    if rank > count:
        raise ConfigError(
            f"rank={rank} is above the {count} public examples. Their gradients span {count} directions at most. "
            f"Use a rank of at most {count}, or declare more examples public."
        )


class _PublicSubspace:
    """The eigenspace of the step: used to project a release, or to sketch examples."""

    def __init__(self, method: PDPSGD, start: Start) -> None:
        self._method, self._start = method, start
        self._full = FullGradient(start.specs)
        self._step = 0
        self._window = -1
        self._directions: dict[str, Tensor] = {}
        self._shared: dict[str, Sketch] = {}

    def sketches(self, step: int) -> Mapping[str, Sketch]:
        """Return the identity, or the eigenspace at the weights of this step."""
        self._step = step
        if not self._method.sketch_first or step < self._method.start_step:
            return self._full.sketches(step)
        self._renew()
        return self._shared

    def refine(self, released: Released) -> Released:
        """Project, unless the release has been sketched or the start is yet to come."""
        if self._method.sketch_first or self._step < self._method.start_step:
            return released
        # The weights are still those that the batch was seen at.
        self._renew()
        return project(released, self._directions)

    def _renew(self) -> None:
        window = (self._step - self._method.start_step) // self._method.refresh_every
        if window == self._window:
            return
        # PRIVACY: the basis is a function of public examples and of weights, which are functions of releases; no batch is in reach.
        gradients = functools.partial(self._start.public_gradients, self._method.public)
        self._take(window, leading_directions(gradients, [list(self._start.specs)], self._method.rank))

    def _take(self, window: int, directions: Mapping[str, Tensor]) -> None:
        self._window, self._directions = window, dict(directions)
        self._shared = {name: Shared(name, part, Provenance.PUBLIC) for name, part in directions.items()}

    def state_dict(self) -> dict[str, object]:
        """Return the eigenspace, which stands until its next turn."""
        return {"window": self._window, "directions": self._directions}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in an eigenspace."""
        weights = self._start.weights
        self._take(state["window"], {name: part.to(weights[name].device) for name, part in state["directions"].items()})
