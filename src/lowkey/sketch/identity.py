"""The identity: coordinates are the gradient itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from lowkey.boundary import Blocks, Provenance
from lowkey.factors import Axis, Convolution, Dense, Factor, Outer


@dataclass(frozen=True, eq=False)
class Identity:
    """No reduction.

    Guarantee:
        Norms are the gradient's own.
    """

    name: str
    shape: tuple[int, ...]

    @property
    def provenance(self) -> Provenance:
        return Provenance.IDENTITY

    @property
    def is_identity(self) -> bool:
        return True

    @property
    def blocks(self) -> Mapping[str, tuple[int, ...]]:
        return {self.name: self.shape}

    def basis(self, axis: Axis) -> Tensor | None:
        """Return None: the input is kept whole."""
        return None

    def compress(self, products: Outer | Convolution, kept: Axis | None) -> Mapping[str, Factor]:
        """Return the products themselves."""
        return {self.name: products}

    def compress_dense(self, gradients: Tensor) -> Mapping[str, Dense]:
        """Return the gradients themselves."""
        return {self.name: Dense(gradients)}

    def decode(self, blocks: Blocks) -> Tensor:
        """Return the released gradient."""
        return blocks[self.name]
