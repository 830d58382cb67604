"""Random sketches of one side of a matrix, redrawn from a seed.

Axes: B examples, R rows and C columns of the parameter seen as a matrix, K kept columns of the basis
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lowkey.boundary import Blocks, Provenance
from lowkey.checks import Word
from lowkey.factors import Axis, Convolution, Dense, Factor, Outer


class Distribution(Word):
    """How the entries of a random basis are drawn; in each case `E[basis basis^T] = I`."""

    GAUSSIAN = "gaussian"
    RADEMACHER = "rademacher"
    STIEFEL = "stiefel"


def draw_basis(distribution: Distribution, width: int, rank: int, key: tuple[object, ...]) -> Float[Tensor, "W K"]:
    """Draw a `width x rank` basis that is a function of `key` alone.

    Args:
        distribution: How to draw; a Stiefel basis has orthogonal columns of length `sqrt(width / rank)`.
        width: The size of the axis to reduce.
        rank: How many columns to keep.
        key: Public facts that name the draw, a seed among them.

    Guarantee:
        Independent of every batch and of every noise key: the seed is public and of this module only.
    """
    generator = _generator(key)
    if distribution is Distribution.RADEMACHER:
        return torch.from_numpy(generator.integers(0, 2, (width, rank)).astype(np.float64) * 2 - 1) / rank**0.5
    normal = torch.from_numpy(generator.standard_normal((width, rank)))
    if distribution is Distribution.GAUSSIAN:
        return normal / rank**0.5
    columns, triangle = torch.linalg.qr(normal)
    return columns * triangle.diagonal().sign() * (width / rank) ** 0.5


def draw_signs(shape: tuple[int, ...], like: Tensor, key: tuple[object, ...]) -> Tensor:
    """Draw numbers that are 1 or -1, as a function of `key` alone, with the dtype and device of `like`.

    Guarantee:
        As for `draw_basis`.

    Example:
        >>> draw_signs((3,), torch.zeros(()), ("seed", 7)).abs()
        tensor([1., 1., 1.])
    """
    numel = math.prod(shape)
    octets = np.frombuffer(_generator(key).bytes(-(-numel // 8)), dtype=np.uint8)
    # One look-up gives eight signs, where unpacking bits would take a pass for each conversion.
    return torch.from_numpy(_SIGNS[octets].reshape(-1)[:numel]).view(shape).to(like)


_SIGNS = 2 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(np.float32) - 1
"""The eight signs that each byte stands for."""


def _generator(key: tuple[object, ...]) -> np.random.Generator:
    # PRIVACY: the projection's key is never a noise key; sharing one would make the noise a multiple of the basis.
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16, person=b"lowkey-basis").digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


@dataclass(frozen=True, eq=False)
class OneSided:
    """Multiply one axis of a matrix gradient by a basis.

    Fields:
        name: The parameter.
        shape: Its shape.
        axis: The axis that is reduced, of the parameter seen as a matrix.
        matrix: The basis, one row per entry of that axis.
        provenance: Where the basis comes from.

    Guarantee:
        Linear and fixed, so clipping after it bounds the sensitivity whatever the basis is.
    """

    name: str
    shape: tuple[int, ...]
    axis: Axis
    matrix: Float[Tensor, "W K"]
    provenance: Provenance

    @property
    def is_identity(self) -> bool:
        return False

    @property
    def proxy_shape(self) -> tuple[int, ...]:
        rows, rank = self.shape[0], self.matrix.shape[1]
        return (rows, rank) if self.axis is Axis.COLS else (rank, *self.shape[1:])

    @property
    def blocks(self) -> Mapping[str, tuple[int, ...]]:
        return {self.name: self.proxy_shape}

    def basis(self, axis: Axis) -> Tensor | None:
        """Return the basis for an input along the reduced axis."""
        return self.matrix if axis is self.axis else None

    def compress(self, products: Outer | Convolution, kept: Axis | None) -> Mapping[str, Factor]:
        """Reduce one side of the products."""
        if kept is self.axis and isinstance(products, Outer):
            return {self.name: Outer(products.rows, products.cols, self.proxy_shape)}
        reduce = products.times if self.axis is Axis.COLS else products.times_from_left
        return {self.name: reduce(self.matrix, self.proxy_shape)}

    def compress_dense(self, gradients: Tensor) -> Mapping[str, Dense]:
        """Reduce per-example gradients."""
        matrix = self.matrix.to(gradients.dtype)
        flat = gradients.flatten(2)
        reduced = flat @ matrix if self.axis is Axis.COLS else matrix.T @ flat
        return {self.name: Dense(reduced.reshape(-1, *self.proxy_shape))}

    def decode(self, blocks: Blocks) -> Tensor:
        """Apply the adjoint, which is unbiased because `E[basis basis^T] = I`."""
        weight = blocks[self.name].new_zeros(self.shape)
        self.move(weight, blocks)
        return weight

    # -- as the subspace that an optimizer steps in --------------------------------------------------------------------

    @property
    def is_centred(self) -> bool:
        return True

    def start(self) -> Mapping[str, Tensor]:
        """Return a proxy at zero."""
        return {self.name: self.matrix.new_zeros(self.proxy_shape)}

    def encode(self, weight: Tensor) -> Mapping[str, Tensor]:
        """Apply the sketch to a tensor of the parameter's shape."""
        return {self.name: self.compress_dense(weight[None])[self.name].value[0]}

    def move(self, weight: Tensor, proxies: Mapping[str, Tensor]) -> None:
        """Add `coordinates basis^T` (or `basis coordinates`) to `weight`, without a full-size temporary."""
        coordinates, matrix = proxies[self.name], self.matrix.to(weight.dtype)
        flat, step = weight.view(weight.shape[0], -1), coordinates.reshape(coordinates.shape[0], -1).to(weight.dtype)
        flat.addmm_(*((step, matrix.T) if self.axis is Axis.COLS else (matrix, step)))

    def rotate_to(self, later: object, block: str, coordinates: Tensor) -> Tensor | None:
        """Apply `basis^T later_basis` along the kept axis."""
        if not isinstance(later, OneSided) or later.axis is not self.axis:
            return None
        rotation = (self.matrix.T @ later.matrix).to(coordinates.dtype)
        if self.axis is Axis.COLS:
            return coordinates @ rotation
        return (rotation.T @ coordinates.flatten(1)).reshape(coordinates.shape)
