"""Two-sided sketches: what a gradient holds in the span of a few columns and of a few rows.

Axes: B examples, T positions, R rows and C columns of the parameter seen as a matrix, K kept dimensions
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lowkey.boundary import Blocks, Provenance
from lowkey.factors import Axis, Convolution, Dense, Factor, OneHot, Outer, wide_dtype
from lowkey.factors.factor import widen


class Core(Enum):
    """What becomes of `L^T G R^T`, which both products of a gradient hold."""

    SUBTRACTED = "both blocks hold it, and decoding takes it away once"
    LEFT_ONLY = "the right block is freed of it before it is clipped"
    ADDED = "both blocks hold it, and decoding adds both, as the adjoint does"


@dataclass(frozen=True, kw_only=True, eq=False)
class Carriers:
    """Multiply each side of a matrix gradient `G` by a basis of its own: `X = G R^T` and `Y = L^T G`.

    If `W = L R + rest`, then `X` is the gradient of `L` and `Y` the gradient of `R`; so the block of `X` is called left.

    Fields:
        name: The parameter; its blocks are `<name>.left` and `<name>.right`.
        shape: Its shape.
        left: `L`, one row per row of the matrix.
        right: `R`, one column per column of the matrix.
        provenance: Where both come from.
        core: What becomes of the part that both blocks hold. The first two choices take it that `L` has orthonormal columns
            and `R` orthonormal rows; then decoding projects a gradient on the matrices whose columns or rows they span.
        zero: The side whose basis is zero, as in an adapter that has not moved yet; the block that it makes is not computed.

    Guarantee:
        Linear and fixed, so clipping both blocks by one norm bounds the sensitivity whatever the bases are.
        With orthonormal bases no norm grows by more than the square root of two, and none grows with `Core.LEFT_ONLY`.

    Cost:
        `O(B T K (R + C))` time; no tensor of the parameter's size before `decode`.

    References:
        [yu2021rgp], Theorem 2.1 and Eq. 3.

    Example:
        >>> both = Carriers(
        ...     name="w",
        ...     shape=(2, 2),
        ...     left=torch.tensor([[1.0], [0.0]]),
        ...     right=torch.tensor([[0.0, 1.0]]),
        ...     provenance=Provenance.RANDOM,
        ... )
        >>> seen = both.compress_dense(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]))
        >>> both.decode({name: block.value[0] for name, block in seen.items()})
        tensor([[1., 2.],
                [0., 4.]])
    """

    name: str
    shape: tuple[int, ...]
    left: Float[Tensor, "R K"]
    right: Float[Tensor, "K C"]
    provenance: Provenance
    core: Core = Core.SUBTRACTED
    zero: Axis | None = None

    @property
    def is_identity(self) -> bool:
        return False

    @property
    def blocks(self) -> Mapping[str, tuple[int, ...]]:
        return {f"{self.name}.left": tuple(self.left.shape), f"{self.name}.right": tuple(self.right.shape)}

    def basis(self, axis: Axis) -> Tensor | None:
        """Return None: one block reduces the input, the other one needs it whole."""
        return None

    def compress(self, products: Outer | Convolution, kept: Axis | None) -> Mapping[str, Factor]:
        """Reduce one side for each block."""
        return dict(zip(self.blocks, (self._left_block(products), self._right_block(products)), strict=True))

    def _left_block(self, products: Outer | Convolution) -> Factor:
        shape = tuple(self.left.shape)
        if self.zero is Axis.COLS:
            return Nothing.like(products, shape)
        return _formed(products.times(self.right.T, shape))

    def _right_block(self, products: Outer | Convolution) -> Factor:
        shape = tuple(self.right.shape)
        if self.zero is Axis.ROWS:
            return Nothing.like(products, shape)
        block = _formed(products.times_from_left(self.left, shape))
        return self._freed(block) if self.core is Core.LEFT_ONLY else block

    def compress_dense(self, gradients: Tensor) -> Mapping[str, Dense]:
        """Reduce per-example gradients."""
        flat = gradients.flatten(2)
        left, right = self.left.to(flat.dtype), self.right.to(flat.dtype)
        products = Dense(flat @ right.T), Dense(left.T @ flat)
        found = (products[0], Dense(self._without_core(products[1].value)) if self.core is Core.LEFT_ONLY else products[1])
        return dict(zip(self.blocks, found, strict=True))

    def decode(self, blocks: Blocks) -> Tensor:
        """Put both blocks together in one product: `X R + L Y`, and with orthonormal bases the core once."""
        x, y = (blocks[name] for name in self.blocks)
        left, right = self.left.to(x.dtype), self.right.to(x.dtype)
        if self.core is Core.SUBTRACTED:
            y = y - (left.T @ x) @ right
        elif self.core is Core.LEFT_ONLY:
            # The noise of the right block reaches into the rows that the left block has spoken for.
            y = self._without_core(y)
        return (torch.cat([x, left], dim=1) @ torch.cat([right, y], dim=0)).view(self.shape)

    def _without_core(self, rows: Float[Tensor, "... C"]) -> Float[Tensor, "... C"]:
        right = self.right.to(rows.dtype)
        return rows - (rows @ right.T) @ right

    def _freed(self, block: Factor) -> Factor:
        """Take the core out of the right block, in whichever form it is smaller."""
        if isinstance(block, Outer) and isinstance(block.cols, Tensor):
            return Outer(block.rows, self._without_core(block.cols), block.shape)
        return Dense(self._without_core(block.dense()))


@dataclass(frozen=True)
class Nothing:
    """Gradients that are zero because a basis is: a product with it would be zero up to a margin for underflow."""

    zeros: Float[Tensor, " B"]
    shape: tuple[int, ...]

    @classmethod
    def like(cls, products: Outer | Convolution, shape: tuple[int, ...]) -> Nothing:
        """Return nothing for each example of `products`."""
        some = products.backprops if isinstance(products, Convolution) else _numbers(products)
        return cls(some.new_zeros(len(some), dtype=wide_dtype(some.dtype)), shape)

    @property
    def numel(self) -> int:
        return 0

    def squared_norms(self) -> Float[Tensor, " B"]:
        return self.zeros

    def add_sum(self, total: Tensor, weights: Float[Tensor, " B"]) -> None:
        """Add nothing."""

    def dense(self) -> Tensor:
        return self.zeros.view(-1, *[1] * len(self.shape)).expand(-1, *self.shape)

    def without(self, bad: Bool[Tensor, " B"]) -> Nothing:
        return self


def _formed(block: Outer | Convolution) -> Factor:
    """Multiply a block out where that is smaller; one of its sides is wide and the other one is not."""
    return block.compacted() if isinstance(block, Convolution) else _product(block)


def _product(outer: Outer) -> Factor:
    rows, cols, shape = outer.rows, outer.cols, outer.shape
    positions, numel = outer.num_positions, shape[0] * shape[1]
    if isinstance(rows, OneHot) or isinstance(cols, OneHot) or numel > positions * sum(shape):
        return outer
    rows, cols = widen(rows), widen(cols)
    # With the narrow side first, the product reads the wide one as it lies in memory, in half the time.
    value = rows.transpose(1, 2) @ cols if shape[0] <= shape[1] else (cols.transpose(1, 2) @ rows).transpose(1, 2).contiguous()
    return Dense(value)


def _numbers(outer: Outer) -> Tensor:
    """Return a side that holds numbers."""
    side = outer.cols if isinstance(outer.rows, OneHot) else outer.rows
    if isinstance(side, OneHot):
        raise TypeError("an outer product of two indices is not a gradient")
    return side
