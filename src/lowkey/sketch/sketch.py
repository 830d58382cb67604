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
