"""Where a backward pass leaves each example's factors.

The collector is owned by one `Private` object and filled by the backward functions of `lowkey.factors`.
Nothing is stored on parameters, tensors or modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from lowkey.boundary import PerExample
from lowkey.errors import PrivacyBoundaryError, ShapeError, UnsupportedLayerError
from lowkey.factors.factor import Dense, Factor, OneHot, Outer, Side, combine
from lowkey.factors.inputs import Inputs, Kept
from lowkey.factors.kernels import Convolution


class Axis(Enum):
    """The two axes of a parameter seen as a matrix: its first axis, and all others flattened."""

    ROWS = "rows"
    COLS = "cols"

    @property
    def other(self) -> Axis:
        return Axis.COLS if self is Axis.ROWS else Axis.ROWS


class Record(Enum):
    """What a backward pass leaves: factors to sum, norms to compare, or both."""

    FACTORS = "factors"
    NORMS = "norms"
    BOTH = "both"


class Compression(Protocol):
    """What the collector asks of a sketch: linear maps of one parameter's gradient."""

    def basis(self, axis: Axis) -> Tensor | None:
        """Return the matrix by which a layer's input, lying along `axis`, may be multiplied at once; None to keep it whole.

        A convolution's has one row for each input channel and tap, or one for each input channel.
        """
        ...

    @property
    def is_identity(self) -> bool:
        """Whether the coordinates are the gradient itself."""
        ...

    def compress(self, products: Outer | Convolution, kept: Axis | None) -> Mapping[str, Factor]:
        """Sketch gradients that are still products, into named blocks; their `kept` side has already been multiplied by its basis."""
        ...

    def compress_dense(self, gradients: Tensor) -> Mapping[str, Factor]:
        """Sketch per-example gradients that were formed in full."""
        ...


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One trainable parameter, as the capture sees it."""

    name: str
    shape: tuple[int, ...]
    compression: Compression


class Derived:
    """A tensor computed from parameters alone (a chunk, a cast, `1 + weight`), before it meets data."""

    def __init__(self, value: Tensor, names: tuple[str, ...]) -> None:
        self.value, self.names = value, names
        self._version = value._version

    @property
    def label(self) -> str:
        return " and ".join(self.names[:3])

    def check_unchanged(self) -> None:
        """Refuse to go on if the tensor was written to after its use: its graph is no longer that of the use."""
        if self.value._version != self._version:
            raise UnsupportedLayerError(
                f"a tensor computed from {self.label} was written to after the data had met it, so its gradient is lost. "
                "Write into a copy: tensor.clone()."
            )


class Collector:
    """Receives factors between `begin` and `finish`.

    Life cycle: `begin(batch_size)`, one backward pass, `finish()`; then again.
    """

    def __init__(self, weights: Mapping[str, Weight], parameters: Mapping[str, Tensor]) -> None:
        self._weights = dict(weights)
        self._parameters = dict(parameters)
        self._batch_size: int | None = None
        self._blocks: dict[str, list[Factor]] = {}
        self._reached: set[str] = set()
        self._derived: dict[Derived, Tensor] = {}
        self._norms: list[tuple[str, Tensor]] | None = None
        self._fewest_rows: int | None = None
        self._keeps = True
        self.inputs = Inputs()

    def begin(self, batch_size: int, record: Record = Record.FACTORS) -> None:
        """Expect one backward pass over `batch_size` losses."""
        self._batch_size = batch_size
        self._blocks = {}
        self._derived = {}
        self._norms = None if record is Record.FACTORS else []
        self._fewest_rows = None
        self._keeps = record is not Record.NORMS

    def finish(self) -> PerExample[Factor]:
        """Return what the backward pass left, every use of a parameter combined."""
        batch_size = self.batch_size
        for derived, cotangent in self._derived.items():
            self._pull_back(derived, cotangent)
        # Blocks of the same name are summed: tied weights, repeated uses, and sketches that several parameters share.
        blocks = {name: combine(uses) for name, uses in self._blocks.items()}
        self.abandon()
        return PerExample(blocks, batch_size)

    def abandon(self) -> None:
        """Forget everything since `begin`."""
        self._batch_size = None
        self._blocks = {}
        self._derived = {}

    @property
    def is_expecting(self) -> bool:
        """Whether a backward pass is under way."""
        return self._batch_size is not None

    @property
    def batch_size(self) -> int:
        if self._batch_size is None:
            raise PrivacyBoundaryError(
                "a backward pass reached a private model outside private.backward. "
                "Raw gradients are not available while the model is private. "
                "Call private.backward(losses) with one loss per example, or private.close() first."
            )
        return self._batch_size

    @property
    def reached(self) -> set[str]:
        """The parameters that any backward pass has reached so far."""
        return self._reached

    @property
    def has_one_row_a_loss(self) -> bool:
        """Whether some operation of the backward pass that is under way had no more rows than there are losses."""
        return self._fewest_rows == self.batch_size

    def use(self, weights: Mapping[str, Weight]) -> None:
        """Sketch with new weights from the next forward pass on."""
        self._weights = dict(weights)

    def take_norms(self) -> list[tuple[str, Tensor]]:
        """Return (parameter, squared norms per example) of every use in the last backward pass, if `begin` asked for them."""
        norms, self._norms = self._norms or [], None
        return norms

    def keep(self, weight: Weight, inputs: Tensor, axis: Axis) -> Kept:
        """Choose what a layer keeps of its input until the backward pass."""
        if weight.compression.is_identity:
            # A factor of the whole gradient holds the input until the clip, so to make it again would save nothing.
            return Kept(inputs.detach())
        return self.inputs.keep(inputs, weight.compression.basis(axis))

    def record_outer(self, target: Weight | Derived, rows: Side, cols: Side, kept: Axis | None) -> None:
        """Take `sum_t rows_t cols_t^T` per example as one use of `target`."""
        rows, cols = self._by_example(rows, target), self._by_example(cols, target)
        if isinstance(target, Derived):
            self._watch(target.names, Outer(rows, cols, ()))
            self._meet_derived(target, Outer(rows, cols, tuple(target.value.shape)).dense())
            return
        self._record_products(target, Outer(rows, cols, target.shape), kept)

    def record_dense(self, target: Weight | Derived, gradients: Tensor) -> None:
        """Take per-example gradients in full, `(rows, *shape)`; rows of one example are summed."""
        shape = target.value.shape if isinstance(target, Derived) else target.shape
        batch = self._check_rows(gradients.shape[0], target)
        if gradients.shape[0] != batch:
            gradients = gradients.reshape(batch, -1, *shape).sum(1)
        gradients = gradients.reshape(batch, *shape)
        if isinstance(target, Derived):
            self._watch(target.names, Dense(gradients))
            self._meet_derived(target, gradients)
            return
        self._check_current(target)
        self._add(target.name, target.compression.compress_dense(gradients))

    def record_convolution(self, target: Weight, convolution: Convolution, kept: Axis | None) -> None:
        """Take the gradients of a convolution's kernel, one row of the batch for each example."""
        self._record_products(target, convolution, kept)

    def _record_products(self, target: Weight, products: Outer | Convolution, kept: Axis | None) -> None:
        self._check_current(target)
        self._add(target.name, {name: _compacted(block) for name, block in target.compression.compress(products, kept).items()})

    def _add(self, name: str, blocks: Mapping[str, Factor]) -> None:
        self._reached.add(name)
        for block_name, block in blocks.items():
            self._watch((name,), block)
            if self._keeps:
                self._blocks.setdefault(block_name, []).append(block)

    def _check_current(self, target: Weight) -> None:
        if self._weights[target.name] is not target:
            raise PrivacyBoundaryError(
                f"these losses come from a forward pass before the last step, when '{target.name}' had another basis. "
                "A sketch is fixed before its batch and released in the same step. Run the model again after private.step()."
            )

    def _watch(self, names: Sequence[str], factor: Factor) -> None:
        if self._norms is not None:
            squares = factor.squared_norms()
            self._norms += [(name, squares) for name in names]

    def _by_example(self, side: Side, target: Weight | Derived) -> Side:
        if isinstance(side, OneHot):
            batch = self._check_rows(side.index.shape[0], target)
            return OneHot(side.index.reshape(batch, -1), side.size)
        batch = self._check_rows(side.shape[0], target)
        return side.reshape(batch, -1, side.shape[-1])

    def _check_rows(self, num_rows: int, target: Weight | Derived) -> int:
        batch = self.batch_size
        if not num_rows or num_rows % batch:
            label = target.label if isinstance(target, Derived) else target.name
            raise ShapeError(
                f"'{label}' was used on {num_rows} rows while {batch} losses were given. "
                "The first axis of every input must be the examples', so that each row belongs to one loss. "
                "Put the batch axis first (batch_first=True) and return one loss per example."
            )
        if num_rows:
            self._fewest_rows = min(num_rows, self._fewest_rows or num_rows)
        return batch

    def _meet_derived(self, derived: Derived, gradients: Tensor) -> None:
        derived.check_unchanged()
        if not self._keeps:
            return
        earlier = self._derived.get(derived)
        self._derived[derived] = gradients if earlier is None else earlier + gradients

    def _pull_back(self, derived: Derived, cotangents: Tensor) -> None:
        """Carry per-example gradients of a derived tensor back to its parameters."""
        derived.check_unchanged()
        parameters = [self._parameters[name] for name in derived.names]
        for name, gradient in zip(derived.names, _per_row(derived.value, parameters, cotangents.to(derived.value.dtype)), strict=True):
            if gradient is not None:
                self._add(name, self._weights[name].compression.compress_dense(gradient.detach()))


def _compacted(block: Factor) -> Factor:
    """Turn a product into plain gradients where those are smaller."""
    return block.compacted() if isinstance(block, Outer | Convolution) else block


def _per_row(value: Tensor, parameters: list[Tensor], cotangents: Tensor) -> Sequence[Tensor | None]:
    """Return the gradient of each parameter for each cotangent, or None where `value` does not depend on it."""
    try:
        return torch.autograd.grad(value, parameters, cotangents, retain_graph=True, is_grads_batched=True, allow_unused=True)
    except RuntimeError:
        pass  # some operations cannot be batched
    try:
        rows = [torch.autograd.grad(value, parameters, row, retain_graph=True, allow_unused=True) for row in cotangents]
    except RuntimeError as error:
        raise UnsupportedLayerError(
            "a tensor computed from weights alone left a reentrant checkpoint, whose graph is gone when its examples are told apart. "
            "Such a tensor must be met by the data inside the checkpoint. Checkpoint with use_reentrant=False."
        ) from error
    return [None if parts[0] is None else torch.stack(parts) for parts in zip(*rows, strict=True)]
