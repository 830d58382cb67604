"""A subspace of one parameter, and what lies outside of it: both are released, each with a limit of its own.

Axes: B examples, K directions
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lowkey.boundary import Blocks, Provenance
from lowkey.factors import Axis, Convolution, Dense, Factor, Outer
from lowkey.release.arithmetic import in_full_precision
from lowkey.sketch.eigen import overlap
from lowkey.sketch.shared import combine_directions, coordinates_of_dense, coordinates_of_products

_MARGIN = 16.0
"""Units of rounding, in parts of a gradient's square, by which the squared norm of its residual is raised."""


def coordinates_block(name: str) -> str:
    """Return the name of the block that holds a parameter's coordinates."""
    return f"{name}.coordinates"


def residual_block(name: str) -> str:
    """Return the name of the block that holds what they do not reach."""
    return f"{name}.residual"


@dataclass(frozen=True, eq=False)
class WithResidual:
    """Coordinates in a subspace of one parameter, and `weight` times the part of the gradient that they do not reach.

    With the rows of `matrix` as `V`, the blocks are `c = V g` and `weight (g - V^T c)`.

    Fields:
        name: The parameter.
        matrix: The directions, orthonormal or zero.
        weight: Scale of the residual, which sets its noise against that of the coordinates.
        provenance: Where the directions come from.

    Guarantee:
        Linear and fixed, so clipping after it bounds the sensitivity, of both blocks by one norm or of each by its own.

    Cost:
        The coordinates' is that of `Shared`. The residual is kept as the gradient's own factors beside the coordinates.
    """

    name: str
    matrix: Float[Tensor, "K ..."]
    weight: float
    provenance: Provenance

    @property
    def is_identity(self) -> bool:
        return False

    @property
    def blocks(self) -> Mapping[str, tuple[int, ...]]:
        return dict(zip(self._names, ((self.matrix.shape[0],), tuple(self.matrix.shape[1:])), strict=True))

    @property
    def _names(self) -> tuple[str, str]:
        return coordinates_block(self.name), residual_block(self.name)

    def basis(self, axis: Axis) -> Tensor | None:
        """Return None: no single side of a matrix is reduced."""
        return None

    @cached_property
    def overlap(self) -> Float[Tensor, "K K"]:
        """The inner products of the directions as they were rounded."""
        return overlap([self.matrix]).to(self.matrix.dtype)

    def compress(self, products: Outer | Convolution, kept: Axis | None) -> Mapping[str, Factor]:
        """Split products."""
        # PRIVACY: the residual's norm is a difference, which coordinates of 11 or 8 bits would spoil: they are taken in full precision.
        with in_full_precision(self.matrix.device):
            whole = products.compacted()
            if isinstance(whole, Dense):
                return self._split_dense(whole.value)
            coordinates = coordinates_of_products(products, self.matrix)
        inside, outside = self._names
        return {inside: Dense(coordinates), outside: Residual(whole, coordinates, self)}

    def compress_dense(self, gradients: Tensor) -> Mapping[str, Factor]:
        """Split per-example gradients that were formed in full."""
        with in_full_precision(self.matrix.device):
            return self._split_dense(gradients)

    def _split_dense(self, gradients: Tensor) -> Mapping[str, Factor]:
        coordinates = coordinates_of_dense(gradients, self.matrix)
        inside, outside = self._names
        return {inside: Dense(coordinates), outside: Dense(Residual(Dense(gradients), coordinates, self).dense())}

    def decode(self, blocks: Blocks) -> Tensor:
        """Put both parts together; without clipping and noise this is the gradient itself."""
        coordinates, residual = (blocks[name] for name in self._names)
        return residual.div(self.weight).add_(combine_directions(coordinates, self.matrix))


@dataclass(frozen=True)
class Residual:
    """`weight` times what gradients leave outside a subspace: `g - V^T c` for given coordinates `c`.

    Fields:
        whole: The gradients.
        coordinates: Their coordinates, as they were rounded.
        sketch: The directions, as they were rounded, and the weight.

    Guarantee:
        `squared_norms` is not below that of what `add_sum` adds, up to rounding of sums over the batch. The sum of whole gradients may be
        700 times as long as that of residuals, and no more: an example nearer to the subspace counts as if it were not.
        Proof: with `V g = c` up to rounding, `|g - V^T c|^2 = |g|^2 - 2 |c|^2 + c^T V V^T c`, and the last product is taken with the Gram
        matrix of the directions as they are, orthonormal or not.
        Let `u` be the spacing of numbers at one. Rounding moves the three terms by a few `u |g|^2`, and what is added by a few `u |g|`.
        With a residual of length `x |g|`, `x <= 1`, the length that is added is at most `(x + 7u) |g|`, and
        `(x + 7u)^2 <= x^2 + 14u + 49u^2 <= x^2 + 16u`: the margin covers it.
    """

    whole: Factor
    coordinates: Float[Tensor, "B K"]
    sketch: WithResidual

    @property
    def numel(self) -> int:
        return self.whole.numel + self.coordinates.numel()

    def squared_norms(self) -> Float[Tensor, " B"]:
        """Bound each example's squared norm from above; for a residual far below the gradient, by more than it is."""
        whole, inside = self.whole.squared_norms(), self.coordinates
        spanned = torch.linalg.vecdot(inside @ self.sketch.overlap, inside)
        outside = whole - 2.0 * torch.linalg.vecdot(inside, inside) + spanned
        # PRIVACY: for a gradient inside the subspace the terms cancel to rounding, and the weight of an example must not follow rounding.
        return self.sketch.weight**2 * (outside.clamp_min(0.0) + _MARGIN * torch.finfo(inside.dtype).eps * whole)

    def add_sum(self, total: Tensor, weights: Float[Tensor, " B"]) -> None:
        """Add the weighted sum, from the sum of gradients and the sum of coordinates."""
        # NUMERICS: both sums may be long and their difference short, so it is taken before the total is met.
        residual = torch.zeros_like(total)
        self.whole.add_sum(residual, weights)
        residual.sub_(combine_directions(weights.to(self.coordinates.dtype) @ self.coordinates, self.sketch.matrix))
        total.add_(residual, alpha=self.sketch.weight)

    def dense(self) -> Tensor:
        whole = self.whole.dense().to(self.coordinates.dtype)
        inside = self.coordinates @ self.sketch.matrix.to(whole.dtype).reshape(self.sketch.matrix.shape[0], -1)
        return self.sketch.weight * (whole - inside.reshape(whole.shape))

    def without(self, bad: Bool[Tensor, " B"]) -> Residual:
        return Residual(self.whole.without(bad), self.coordinates.masked_fill(bad[:, None], 0.0), self.sketch)
