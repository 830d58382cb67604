"""Batches of any structure: how many examples they hold, and how to cut them into parts that fit memory."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from lowkey.checks import require_count
from lowkey.errors import ShapeError

Batch = TypeVar("Batch")
_Array = torch.Tensor | NDArray[np.generic]
_Column = _Array | list[object] | tuple[object, ...]
_OnColumn = Callable[[str, _Column], object]

_CELLS = (str, bytes, int, float, complex, np.generic)
"""What makes a list one entry per example rather than a structure of columns."""


def split(batch: Batch, size: int) -> list[Batch]:
    """Cut a batch into parts of at most `size` examples, in order.

    Tensors and arrays are cut along their first axis, lists and tuples of strings or numbers entry by entry.
    Mappings, lists, tuples, named tuples and dataclasses are walked and rebuilt; numbers, strings, None and anything unknown pass through.

    Args:
        batch: What a collate function returned.
        size: The most examples that one part may hold.

    Returns:
        The parts; an empty batch has none. Tensors in them are views of the batch.

    Raises:
        ConfigError: If `size` is not a positive integer.
        ShapeError: If two columns disagree about the number of examples, or none tells it.

    Guarantee:
        Every example lies in exactly one part, so a sum over examples does not depend on `size`, up to the rounding of its order.

    Example:
        >>> [part["x"].tolist() for part in split({"x": torch.arange(5), "name": "digits"}, 2)]
        [[0, 1], [2, 3], [4]]
    """
    require_count("size", size)
    count = batch_size(batch)
    return [_narrow(batch, start, min(start + size, count)) for start in range(0, count, size)]


def batch_size(batch: object) -> int:
    """Count the examples of a batch of any structure.

    Args:
        batch: What a collate function returned.

    Returns:
        The common length of all its columns.

    Raises:
        ShapeError: If two columns disagree, or there is none.

    Guarantee:
        The count of a drawn batch is private: it may size a buffer, but never a learning rate, a divisor or a log.

    Example:
        >>> batch_size([torch.zeros(3, 2), ("a", "b", "c"), None])
        3
    """
    columns = _columns(batch)
    if not columns:
        raise ShapeError(
            f"no column was found in a batch of type {type(batch).__name__}. The number of examples is read off tensors, arrays or lists. "
            "Let collate_fn return at least one tensor whose first axis is the examples."
        )
    first_path, count = columns[0]
    for path, length in columns:
        if length != count:
            raise ShapeError(
                f"{path} has {length} entries but {first_path} has {count}. Every column needs one entry per example on its first axis. "
                "Expand what all examples share, or pass it outside the batch."
            )
    return count


def empty_like(batch: Batch) -> Batch:
    """Return the batch of no examples that has the structure of `batch`.

    Guarantee:
        Keeps shapes beyond the first axis, dtypes and keys, and no value of any example.
    """
    batch_size(batch)
    return _narrow(batch, 0, 0)


def map_columns(batch: Batch, change: Callable[[Any], object]) -> Batch:
    """Rebuild a batch with `change(column)` in place of each of its columns.

    Guarantee:
        Whatever is no column passes through, and `batch` itself is not changed.

    Example:
        >>> map_columns({"x": torch.arange(3), "name": "digits"}, lambda column: column[1:])
        {'x': tensor([1, 2]), 'name': 'digits'}
    """
    return cast("Batch", _walk(batch, "batch", lambda _, column: change(column)))


def _columns(batch: object) -> list[tuple[str, int]]:
    """List the path and the length of each column; an empty list or tuple counts only where nothing else does."""
    columns: list[tuple[str, int]] = []
    empty: list[tuple[str, int]] = []

    def note(path: str, column: _Column) -> object:
        is_bare = isinstance(column, (list, tuple)) and not column
        (empty if is_bare else columns).append((path, len(column)))
        return column

    _walk(batch, "batch", note)
    return columns or empty


def _narrow(batch: Batch, start: int, stop: int) -> Batch:
    return cast("Batch", _walk(batch, "batch", lambda _, column: column[start:stop]))


def _walk(node: object, path: str, on_column: _OnColumn) -> object:
    """Rebuild `node` with `on_column(path, column)` in place of each column."""
    if isinstance(node, (torch.Tensor, np.ndarray)):
        return on_column(path, node) if node.ndim else node
    if isinstance(node, Mapping):
        mapping = cast("Mapping[object, object]", node)
        return _rebuild_mapping(mapping, {key: _walk(value, f"{path}[{key!r}]", on_column) for key, value in mapping.items()})
    if isinstance(node, (list, tuple)):
        return _walk_sequence(cast("list[object] | tuple[object, ...]", node), path, on_column)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return _walk_dataclass(node, path, on_column)
    return node


def _rebuild_mapping(original: Mapping[object, object], items: dict[object, object]) -> object:
    if type(original) is dict or not isinstance(original, MutableMapping):
        return items
    # A copy keeps what a special mapping knows beside its items, such as the methods of a tokenizer's output.
    clone = copy.copy(original)
    clone.update(items)
    return clone


def _walk_sequence(sequence: list[object] | tuple[object, ...], path: str, on_column: _OnColumn) -> object:
    if all(isinstance(entry, _CELLS) for entry in sequence) and not hasattr(sequence, "_fields"):
        return on_column(path, sequence)
    entries = [_walk(entry, f"{path}[{position}]", on_column) for position, entry in enumerate(sequence)]
    if hasattr(sequence, "_fields"):  # a named tuple takes its fields one by one
        return cast("Callable[..., object]", type(sequence))(*entries)
    return tuple(entries) if isinstance(sequence, tuple) else entries


def _walk_dataclass(node: Any, path: str, on_column: _OnColumn) -> object:
    clone = copy.copy(node)
    for field in dataclasses.fields(node):
        value = _walk(getattr(node, field.name), f"{path}.{field.name}", on_column)
        object.__setattr__(clone, field.name, value)  # also where the dataclass is frozen
    return clone
