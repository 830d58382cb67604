"""The interface of a sketch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from lowkey.boundary import Blocks, Provenance
from lowkey.factors import Compression


class Sketch(Compression, Protocol):
    """A linear map from one parameter's gradient to named blocks of coordinates, with its way back.

    Guarantee:
        The map was fixed before the batch that it sketches: its basis is the identity, public, random, or made of earlier releases.
    """

    @property
    def provenance(self) -> Provenance:
        """Where the basis comes from."""
        ...

    @property
    def blocks(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every block that this sketch fills; sketches that name the same block add up in it."""
        ...

    def decode(self, blocks: Blocks) -> Tensor:
        """Map released coordinates to an estimate of the gradient, unbiased over the draw of a random basis."""
        ...


class Subspace(Sketch, Protocol):
    """A sketch with one block, in which an optimizer can keep its state.

    The optimizer steps a proxy of that block's shape, and the proxy's step is decoded into the weight.
    """

    @property
    def proxy_shape(self) -> tuple[int, ...]:
        """The shape of the coordinates."""
        ...

    def encode(self, weight: Tensor) -> Tensor:
        """Apply the sketch to a tensor of the parameter's shape."""
        ...

    def add_decoded(self, weight: Tensor, coordinates: Tensor) -> None:
        """Add the decoded coordinates to `weight`, in place and without a full-size temporary."""
        ...

    def rotation_to(self, later: Subspace) -> Tensor | None:
        """Return the matrix that carries coordinates here to coordinates of `later`, applied along the sketched axis."""
        ...

    def rotate(self, coordinates: Tensor, rotation: Tensor) -> Tensor:
        """Apply a rotation to coordinates."""
        ...
