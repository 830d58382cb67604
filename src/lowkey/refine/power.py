"""One power iteration on each released matrix, with the error handed on to the next release.

Axes: R rows and C columns of a released matrix, K kept dimensions
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lowkey.boundary import Released


class PowerSteps:
    """Replaces released matrices by matrices of low rank, and adds what is lost to the next release.

    Args:
        starts: Where the iteration starts, by block: one row per column of the block seen as a matrix.

    Guarantee:
        Reads released values only, so it is post-processing; what it remembers is made of releases too.

    Cost:
        `O(K R C)` time, and one number kept for each number of the blocks.

    References:
        [vogels2019powersgd], Alg. 1 and 2, on one released matrix in place of many workers' own.
    """

    def __init__(self, starts: Mapping[str, Float[Tensor, "C K"]]) -> None:
        self._cols = dict(starts)
        self._lost: dict[str, Tensor] = {}

    @torch.no_grad()
    def refine(self, released: Released) -> Released:
        """Return the release with low-rank matrices."""
        blocks = {name: self._approximate(name, block) if name in self._cols else block for name, block in released.blocks.items()}
        return dataclasses.replace(released, blocks=blocks)

    def _approximate(self, name: str, block: Tensor) -> Tensor:
        # PRIVACY: the error fed back is that of a release; the error of the sum before its noise would carry it out unprotected.
        wanted = block.flatten(1) + self._lost[name] if name in self._lost else block.flatten(1).clone()
        rows = torch.linalg.qr(wanted @ self._cols[name].to(wanted))[0]
        self._cols[name] = wanted.T @ rows
        found = rows @ self._cols[name].T
        self._lost[name] = wanted.sub_(found)
        return found.view(block.shape)

    def state_dict(self) -> dict[str, object]:
        """Return the last directions and errors."""
        return {"columns": dict(self._cols), "lost": dict(self._lost)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        like = self._cols
        self._cols = {name: cols.to(like[name].device) for name, cols in state["columns"].items()}
        self._lost = {name: lost.to(like[name].device) for name, lost in state["lost"].items()}
