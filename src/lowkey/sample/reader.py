"""Reading the examples that were drawn, as batches of the dataset's own structure."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset, default_collate

from lowkey.errors import ConfigError
from lowkey.sample.microbatch import empty_like

Indices = NDArray[np.int64]
Collate = Callable[[list[Any]], Any]


class Examples(Protocol):
    """A map-style dataset: a length, and an example for each index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


class BatchReader(Dataset[object]):
    """Turns indices into a batch, also where there are none.

    Guarantee:
        A batch holds exactly the drawn examples. An empty one has the structure of a batch of one example and no value of it.
    """

    def __init__(self, examples: Examples, collate_fn: Collate) -> None:
        self._examples = examples
        self._collate_fn = collate_fn

    def __getitem__(self, indices: Indices) -> object:
        # A TensorDataset under torch's own collate is one gather for each tensor, several times faster than stacking examples.
        if type(self._examples) is TensorDataset and self._collate_fn is default_collate:
            rows = torch.from_numpy(indices)
            return [tensor.index_select(0, rows) for tensor in cast("TensorDataset", self._examples).tensors]
        if len(indices) == 0:
            return empty_like(self._collate_fn([self._examples[0]]))
        return self._collate_fn(self._fetch(indices.tolist()))

    def _fetch(self, indices: list[int]) -> list[Any]:
        fetch_many = getattr(self._examples, "__getitems__", None)
        return fetch_many(indices) if fetch_many is not None else [self._examples[index] for index in indices]

    def read(self, draws: Iterable[Indices], num_workers: int) -> Iterator[object]:
        """Yield the batch of each draw, in order.

        Guarantee:
            One batch for each draw, whatever `num_workers` is; torch's global generator is not touched.
        """
        # The loader would otherwise take the seed of its workers from the global generator.
        worker_seeds = torch.Generator().manual_seed(int.from_bytes(os.urandom(8), "little", signed=True))
        sampler = cast("Sampler[Indices]", draws)
        yield from DataLoader(self, batch_size=None, sampler=sampler, num_workers=num_workers, collate_fn=_as_is, generator=worker_seeds)


def check_examples(examples: object, num_examples: int) -> None:
    """Refuse a dataset that cannot be drawn from by index, or is not of the planned size.

    Raises:
        ConfigError: If `examples` is a mapping, has no length or no indexing, or holds another number of examples.

    Guarantee:
        The sampling rate that the accountant was told is the one that holds for these examples.
    """
    kind = type(examples).__name__
    if isinstance(examples, Mapping):
        raise ConfigError(
            f"dataset is a {kind}, so its length counts columns or splits. Examples are drawn by number. "
            "Pass one split, or torch.utils.data.TensorDataset(*columns.values())."
        )
    if isinstance(examples, DataLoader):
        raise ConfigError(
            "dataset is a DataLoader, which has batches of its own. Examples are drawn one by one, each by its own coin. "
            "Pass loader.dataset, and loader.collate_fn as collate_fn."
        )
    if not (hasattr(examples, "__len__") and hasattr(examples, "__getitem__")):
        raise ConfigError(
            f"dataset is a {kind} without len() and indexing. Every example must be able to join any step, so a stream cannot be sampled. "
            "Pass a map-style dataset, or list(dataset) if it fits memory."
        )
    count = len(cast("Examples", examples))
    if count != num_examples:
        hint = "Did you mean torch.utils.data.TensorDataset(*dataset)? " if _is_tuple_of_tensors(examples) else ""
        raise ConfigError(
            f"dataset has {count} examples but the plan was made for num_examples={num_examples}. The sampling rate would not be "
            f"the planned one. {hint}Pass the planned dataset, or plan again with num_examples={count}."
        )


def _is_tuple_of_tensors(examples: object) -> bool:
    return isinstance(examples, tuple) and all(isinstance(column, torch.Tensor) for column in cast("tuple[object, ...]", examples))


def _as_is(batch: object) -> object:
    return batch
