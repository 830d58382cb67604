"""Naive DP-GaLore: noise the full gradient, then project it on the singular vectors of what was released."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowkey.boundary import Provenance, Released
from lowkey.checks import require_count
from lowkey.factors import Axis, ParameterSpec, wide_dtype
from lowkey.methods.matrices import wide_matrices
from lowkey.methods.method import FullGradient, Start, Strategy
from lowkey.optim import Subspace
from lowkey.sketch import OneSided


@dataclass(frozen=True, kw_only=True)
class NaiveGaLore:
    """Release the whole gradient; every few steps, take a basis from its singular vectors, and let the optimizer live there.

    The smaller side of each matrix is reduced. It is here to be compared with: the noise has the full dimension, and the basis follows it.

    Fields:
        rank: Kept dimensions per matrix.
        refresh_every: Steps between two bases.

    Guarantee:
        That of `DPSGD`: bases are functions of releases.

    References:
        [grape2025], Alg. 5; [zhao2024galore] for the projection.

    Example:
        >>> NaiveGaLore(rank=4, refresh_every=50).refresh_every
        50
    """

    rank: int
    refresh_every: int = 100

    def __post_init__(self) -> None:
        require_count("rank", self.rank)
        require_count("refresh_every", self.refresh_every)

    @property
    def has_guarantee(self) -> bool:
        return True

    def start(self, start: Start) -> Strategy:
        """Become a strategy for one model."""
        bases = _SingularBases(self, start)
        return Strategy(sketching=FullGradient(start.specs), refining=bases, space=bases)


class _SingularBases:
    """The leading singular vectors of some release, for each matrix."""

    def __init__(self, method: NaiveGaLore, start: Start) -> None:
        self._method, self._start, self._count = method, start, 0
        self._current = {name: self._blank(start.specs[name]) for name in wide_matrices(start.specs, method.rank)}

    def _blank(self, spec: ParameterSpec) -> OneSided:
        """Hold the place of a basis until the first release gives one."""
        rows, cols = spec.matrix_shape
        weight = self._start.weights[spec.name]
        matrix = torch.zeros(min(rows, cols), self._method.rank, dtype=wide_dtype(weight.dtype), device=weight.device)
        return self._with(spec, matrix)

    def _with(self, spec: ParameterSpec, matrix: Tensor) -> OneSided:
        rows, cols = spec.matrix_shape
        return OneSided(spec.name, spec.shape, Axis.ROWS if rows <= cols else Axis.COLS, matrix, Provenance.HISTORICAL)

    def subspaces(self) -> Mapping[str, Subspace]:
        """Return the bases of the moment."""
        return dict(self._current)

    def refine(self, released: Released) -> Released:
        """Project a release, after taking new bases from it where they are due."""
        if self._count % self._method.refresh_every == 0:
            # PRIVACY: the basis is made of the release, after its noise; from the gradient itself it would be a second look at the batch.
            self._current = {name: self._with(self._start.specs[name], self._leading(released.blocks[name])) for name in self._current}
        self._count += 1
        projected = {block: value for name, basis in self._current.items() for block, value in basis.encode(released.blocks[name]).items()}
        return dataclasses.replace(released, blocks={**released.blocks, **projected})

    def _leading(self, gradient: Tensor) -> Tensor:
        """Return the singular vectors of the smaller side."""
        flat = gradient.flatten(1)
        smaller = flat if flat.shape[0] <= flat.shape[1] else flat.T
        # NUMERICS: the Gram matrix of the smaller side has the same leading vectors, at a fraction of a decomposition's cost.
        vectors = torch.linalg.eigh(smaller.double() @ smaller.double().T)[1]
        return vectors[:, -self._method.rank :].flip(1).to(gradient.dtype)

    def state_dict(self) -> dict[str, object]:
        """Return the bases, and how many releases they have seen."""
        return {"count": self._count, "bases": {name: basis.matrix for name, basis in self._current.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self._count = state["count"]
        self._current = {
            name: self._with(self._start.specs[name], state["bases"][name].to(basis.matrix)) for name, basis in self._current.items()
        }
