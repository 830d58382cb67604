"""The interface of coordinates that an optimizer steps in place of a weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor


class Subspace(Protocol):
    """Coordinates in which an optimizer keeps its state, and the way from its step to the weight.

    The optimizer steps *proxies*, one per block, whose gradients are the released blocks of the same names.
    Centred proxies start every step at zero, so what the optimizer leaves in them is its step, and weight decay acts on the real weight.
    Others hold values that persist, as the factors of an adapter, and decay by themselves.
    """

    @property
    def is_centred(self) -> bool:
        """Whether proxies hold a step rather than a value."""
        ...

    def start(self) -> Mapping[str, Tensor]:
        """Return what each proxy holds before its first step, by block."""
        ...

    def encode(self, weight: Tensor) -> Mapping[str, Tensor]:
        """Return the coordinates of a tensor of the weight's shape."""
        ...

    def move(self, weight: Tensor, proxies: Mapping[str, Tensor]) -> None:
        """Carry over to `weight`, in place, what the optimizer has left in the proxies."""
        ...

    def rotate_to(self, later: Subspace, block: str, coordinates: Tensor) -> Tensor | None:
        """Return the coordinates in a later basis; None where there is no telling."""
        ...
