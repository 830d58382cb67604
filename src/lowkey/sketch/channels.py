"""Sketches of a convolution's kernel along its input channels.

Axes: B examples, O output channels, C input channels, P taps of the kernel, K kept channels
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from lowkey.boundary import Blocks, Provenance
from lowkey.factors import Axis, Convolution, Dense, Factor, Outer


@dataclass(frozen=True, eq=False)
class Channels:
    """Multiply the input channels of a kernel by a basis, the same for every tap.

    Seen as a matrix of `C * P` columns, the kernel is multiplied by the Kronecker product of the basis and the identity of the taps.
    What is left is the kernel of a convolution with fewer input channels, so a layer's input is reduced pixel by pixel.

    Fields:
        name: The parameter.
        shape: Its shape: output channels, input channels, and the taps along each axis.
        matrix: The basis, one row per input channel.
        provenance: Where the basis comes from.

    Guarantee:
        Linear and fixed, so clipping after it bounds the sensitivity whatever the basis is.
    """

    name: str
    shape: tuple[int, ...]
    matrix: Float[Tensor, "C K"]
    provenance: Provenance

    @property
    def is_identity(self) -> bool:
        return False

    @property
    def proxy_shape(self) -> tuple[int, ...]:
        return (self.shape[0], self.matrix.shape[1], *self.shape[2:])

    @property
    def blocks(self) -> Mapping[str, tuple[int, ...]]:
        return {self.name: self.proxy_shape}

    def basis(self, axis: Axis) -> Tensor | None:
        """Return the basis for the channels of an input."""
        return self.matrix if axis is Axis.COLS else None

    def compress(self, products: Outer | Convolution, kept: Axis | None) -> Mapping[str, Factor]:
        """Reduce the channels of inputs, or of patches that output gradients have met."""
        if kept is Axis.COLS:
            return {self.name: replace(products, shape=self.proxy_shape)}
        if isinstance(products, Convolution):
            return {self.name: products.times_channels(self.matrix, self.proxy_shape)}
        assert isinstance(products.cols, Tensor), "a kernel meets numbers, not indices"
        patches_BTCP = products.cols.unflatten(2, (len(self.matrix), self._num_taps))
        return {self.name: Outer(products.rows, (self.matrix.T.to(patches_BTCP.dtype) @ patches_BTCP).flatten(2), self.proxy_shape)}

    def compress_dense(self, gradients: Tensor) -> Mapping[str, Dense]:
        """Reduce per-example gradients."""
        reduced = self.matrix.T.to(gradients.dtype) @ gradients.flatten(3)
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
        """Add `basis coordinates` to every output channel of `weight`, without a full-size temporary."""
        step_OKP = proxies[self.name].reshape(len(weight), -1, self._num_taps).to(weight.dtype)
        matrix = self.matrix.to(weight.dtype)
        weight.view(len(weight), len(matrix), -1).baddbmm_(matrix.expand(len(weight), -1, -1), step_OKP)

    def rotate_to(self, later: object, block: str, coordinates: Tensor) -> Tensor | None:
        """Apply `later_basis^T basis` to the kept channels."""
        if not isinstance(later, Channels):
            return None
        rotation = (later.matrix.T @ self.matrix).to(coordinates.dtype)
        return (rotation @ coordinates.flatten(2)).reshape(later.proxy_shape)

    @property
    def _num_taps(self) -> int:
        return math.prod(self.shape[2:])
