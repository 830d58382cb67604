"""A subspace of all parameters together: its coordinates are one short vector that every parameter adds to.

Axes: B examples, T positions, R rows and C columns of the parameter seen as a matrix, K coordinates
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lowkey.boundary import Blocks, Provenance
from lowkey.factors import Axis, Convolution, Dense, OneHot, Outer, wide_dtype
from lowkey.factors.factor import Side
from lowkey.sketch.random import Distribution, draw_basis

SUBSPACE = "subspace"
"""The block that all parameters share."""

_CHUNK_ELEMENTS = 1 << 24
"""Temporaries over a batch are cut so that they hold about this many numbers."""


@dataclass(frozen=True, eq=False)
class Shared:
    """One parameter's part of a subspace that spans all of them.

    With the rows of every parameter's `matrix` laid side by side as `V` (K x all coordinates), the sum of all parts is `V g`.

    Fields:
        name: The parameter.
        matrix: Its part of each of the K directions.
        provenance: Where the directions come from.

    Guarantee:
        Linear and fixed. The collector adds up the parts of one example before it is clipped, so clipping bounds the sensitivity
        of the sum whatever the directions are.

    Cost:
        Each example's gradient is formed a few rows at a time, in a temporary of 64 MiB in float32, or of one row for each example if
        that is more. Kernels of convolutions are formed a few examples at a time.

    Example:
        >>> sketch = Shared("weight", torch.tensor([[[3.0, 4.0]]]) / 5, Provenance.PUBLIC)
        >>> sketch.compress_dense(torch.tensor([[[5.0, 10.0]]]))["subspace"].value
        tensor([[11.]])
        >>> sketch.decode({"subspace": torch.tensor([5.0])})
        tensor([[3., 4.]])
    """

    name: str
    matrix: Float[Tensor, "K ..."]
    provenance: Provenance

    @property
    def is_identity(self) -> bool:
        return False

    @property
    def blocks(self) -> Mapping[str, tuple[int, ...]]:
        return {SUBSPACE: (self.matrix.shape[0],)}

    def basis(self, axis: Axis) -> Tensor | None:
        """Return None: no single side of a matrix is reduced."""
        return None

    def compress(self, products: Outer | Convolution, kept: Axis | None) -> Mapping[str, Dense]:
        """Return the coordinates of products."""
        return {SUBSPACE: Dense(coordinates_of_products(products, self.matrix))}

    def compress_dense(self, gradients: Tensor) -> Mapping[str, Dense]:
        """Return the coordinates of per-example gradients."""
        return {SUBSPACE: Dense(coordinates_of_dense(gradients, self.matrix))}

    def decode(self, blocks: Blocks) -> Tensor:
        """Apply the adjoint, which is the nearest point of the subspace where the directions are orthonormal."""
        return combine_directions(blocks[SUBSPACE], self.matrix)


def draw_directions(shape: tuple[int, ...], some: range, rank: int, key: tuple[object, ...]) -> Float[Tensor, "K ..."]:
    """Draw one parameter's part of some of `rank` Gaussian directions, with entries of variance `1 / rank`.

    Guarantee:
        A function of its arguments alone, as `draw_basis` is.
    """
    drawn = draw_basis(Distribution.GAUSSIAN, math.prod(shape), len(some), (*key, some.start, rank))
    return (drawn.T * (len(some) / rank) ** 0.5).reshape(len(some), *shape)


def combine_directions(coordinates: Float[Tensor, " K"], matrix: Float[Tensor, "K ..."]) -> Tensor:
    """Return `sum_k coordinates[k] matrix[k]`; of a single direction that is taken once, the direction itself."""
    if len(matrix) == 1 and float(coordinates[0]) == 1.0:
        return matrix[0]
    return (coordinates.to(matrix.dtype) @ matrix.reshape(matrix.shape[0], -1)).reshape(matrix.shape[1:])


def coordinates_of_dense(gradients: Float[Tensor, "B ..."], matrix: Float[Tensor, "K ..."]) -> Float[Tensor, "B K"]:
    """Return `<matrix[k], gradient_b>` for gradients that were formed in full.

    Guarantee:
        Row `b` depends on example `b` only.
    """
    dtype = wide_dtype(gradients.dtype)
    return gradients.to(dtype).reshape(gradients.shape[0], -1) @ matrix.to(dtype).reshape(matrix.shape[0], -1).T


def coordinates_of_products(products: Outer | Convolution, matrix: Float[Tensor, "K ..."]) -> Float[Tensor, "B K"]:
    """Return `<matrix[k], gradient_b>` for gradients in factored form, of which only a part exists at any time.

    Guarantee:
        Row `b` depends on example `b` only.
    """
    if isinstance(products, Convolution):
        few = _CHUNK_ELEMENTS // math.prod(products.shape)
        return torch.cat([coordinates_of_dense(part.dense(), matrix) for part in products.split(few)])
    rows, cols = products.rows, products.cols
    if isinstance(rows, OneHot) and isinstance(cols, Tensor):
        return _looked_up(rows, cols, matrix.reshape(matrix.shape[0], rows.size, -1))
    if isinstance(cols, OneHot) and isinstance(rows, Tensor):
        return _looked_up(cols, rows, matrix.reshape(matrix.shape[0], -1, cols.size).transpose(1, 2))
    if isinstance(rows, Tensor) and isinstance(cols, Tensor):
        dtype = wide_dtype(rows.dtype)
        return _multiplied(rows.to(dtype), cols.to(dtype), matrix.to(dtype).reshape(matrix.shape[0], rows.shape[2], cols.shape[2]))
    raise TypeError("an outer product of two indices is not a gradient")


def _multiplied(rows: Float[Tensor, "B T R"], cols: Float[Tensor, "B T C"], matrix: Float[Tensor, "K R C"]) -> Float[Tensor, "B K"]:
    found = rows.new_zeros(rows.shape[0], matrix.shape[0])
    for part in _parts(rows.shape[2], cols.shape[0] * cols.shape[2]):
        gradients_BrC = rows[:, :, part].transpose(1, 2) @ cols
        found.addmm_(gradients_BrC.flatten(1), matrix[:, part].flatten(1).T)
    return found


def _looked_up(index: OneHot, values: Side, matrix: Float[Tensor, "K V C"]) -> Float[Tensor, "B K"]:
    """Multiply each position's value with the direction's row that it was looked up from: the vocabulary is never walked."""
    if isinstance(values, OneHot):
        raise TypeError("an outer product of two indices is not a gradient")
    values = values.to(wide_dtype(values.dtype))
    found = [
        torch.einsum("kbtc,btc->bk", matrix[part][:, index.index].to(values.dtype), values)
        for part in _parts(matrix.shape[0], values.numel())
    ]
    return torch.cat(found, 1)


def _parts(count: int, elements_each: int) -> list[slice]:
    width = max(1, _CHUNK_ELEMENTS // max(1, elements_each))
    return [slice(start, start + width) for start in range(0, count, width)]
