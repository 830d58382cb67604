"""The types that private data passes through, and where it stops being private.

    PerExample  ──clip, sum──▶  Sensitive(l2_bound)  ──noise──▶  Released(noise_std)

A `PerExample` has a batch axis and no bound.
A `Sensitive` is one sum with a proven L2 bound on what a single example adds to it.
A `Released` has been noised: it is public, and every function of it is public too.

The fields that hold private tensors start with an underscore.
Reading one outside `lowkey.release` is a type error under pyright's strict mode, and a policy test pins the list of places that do.
Python can be forced: this guards against mistakes, not against malice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, NoReturn, TypeVar

from torch import Tensor

from lowkey.errors import PrivacyBoundaryError

F_co = TypeVar("F_co", covariant=True)
"""The representation of one block of per-example gradients (`lowkey.factors.Factor`)."""

Blocks = Mapping[str, Tensor]
"""Coordinates by block name: a parameter's own name, or whatever its sketch calls the pieces it makes."""


class Provenance(Enum):
    """Where a basis comes from; nothing else may shape a sketch."""

    IDENTITY = "identity"
    PUBLIC = "public data"
    RANDOM = "fresh randomness"
    HISTORICAL = "earlier releases"


def _refuse(what: str) -> NoReturn:
    raise PrivacyBoundaryError(
        f"a {what} value was read before noise was added. "
        "Its content is private until lowkey.release.release_gaussian has noised it. "
        "Call release_gaussian and use the Released result."
    )


class PerExample(Generic[F_co]):
    """Each example's coordinates, unbounded and private.

    Guarantee:
        None: this is raw private data.
    """

    __slots__ = ("_batch_size", "_blocks")

    def __init__(self, blocks: Mapping[str, F_co], batch_size: int) -> None:
        self._blocks = blocks
        self._batch_size = batch_size

    def __repr__(self) -> str:
        return f"PerExample({len(self._blocks)} blocks, values hidden)"

    def __bool__(self) -> bool:
        _refuse("PerExample")

    def __len__(self) -> int:
        _refuse("PerExample")


class Sensitive:
    """A sum over examples that moves by at most `l2_bound` when one example joins or leaves.

    Fields:
        l2_bound: The proven L2 bound, over all blocks together.
    """

    __slots__ = ("_blocks", "l2_bound")

    def __init__(self, blocks: Blocks, l2_bound: float) -> None:
        self._blocks = blocks
        self.l2_bound = l2_bound

    def __repr__(self) -> str:
        shapes = {name: tuple(block.shape) for name, block in self._blocks.items()}
        return f"Sensitive(l2_bound={self.l2_bound}, shapes={shapes}, values hidden)"

    def __bool__(self) -> bool:
        _refuse("Sensitive")

    def __float__(self) -> float:
        _refuse("Sensitive")

    def __len__(self) -> int:
        _refuse("Sensitive")


@dataclass(frozen=True, kw_only=True)
class Released:
    """A noised sum divided by the expected batch size: public from here on.

    Fields:
        blocks: The released coordinates, by block name.
        noise_std: Standard deviation of the noise on each coordinate, after the division.
        l2_bound: Largest L2 distance that one example can move the value by, after the division.
        step: Which release this is, counted from 1.
    """

    blocks: Blocks
    noise_std: float
    l2_bound: float
    step: int


@dataclass(frozen=True)
class Public:
    """Examples that the user declares public, with the loss that gives their gradients.

    Nothing checks the declaration: whatever is placed here is not protected.

    Fields:
        examples: The public examples, in the form that `loss` takes.
        loss: Called with `(model, examples)`; returns one loss per example.
    """

    examples: Sequence[object] | Mapping[str, Tensor] | Tensor
    loss: Callable[..., Tensor]

    def __repr__(self) -> str:
        # Ledgers, statements and checkpoints name a method by its text, which must be short and the same in every process.
        column: Any = self.examples
        if isinstance(column, Mapping):
            column = next(iter(column.values()), ())
        elif not isinstance(column, Tensor) and len(column) and isinstance(column[0], Tensor):
            column = column[0]
        return f"Public({len(column)} examples, loss={getattr(self.loss, '__qualname__', type(self.loss).__name__)})"
