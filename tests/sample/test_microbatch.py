"""Cutting batches of any structure."""

from __future__ import annotations

import types
from collections import UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowkey.errors import ConfigError, ShapeError
from lowkey.sample import batch_size, empty_like, split

Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True)
class Sentences:
    ids: Tensor
    names: list[str]
    scale: float = 0.5


class Encoding(UserDict[str, object]):
    """A mapping that knows something beside its items, like the output of a tokenizer."""

    origin = "unset"


X = torch.arange(10.0).reshape(5, 2)
NAMES = ["a", "b", "c", "d", "e"]


@given(count=st.integers(0, 40), size=st.integers(1, 50))
def test_parts_hold_every_example_once_and_in_order(count: int, size: int) -> None:
    parts = split({"x": torch.arange(count)}, size)
    assert [example for part in parts for example in part["x"].tolist()] == list(range(count))
    assert all(1 <= len(part["x"]) <= size for part in parts)


def test_parts_are_views_of_the_batch() -> None:
    batch = {"x": torch.zeros(4)}
    split(batch, 3)[1]["x"].fill_(7.0)
    assert batch["x"].tolist() == [0, 0, 0, 7]


@pytest.mark.parametrize(
    "batch", [X, X.numpy(), NAMES, tuple(NAMES), [X, NAMES], (X, {"n": NAMES}), Pair(X, NAMES), Sentences(X, NAMES), {"x": X}]
)
def test_structures_are_rebuilt_with_their_own_type(batch: object) -> None:
    first, second = split(batch, 3)
    assert type(first) is type(batch)
    assert (batch_size(first), batch_size(second)) == (3, 2)


def test_named_tuples_and_dataclasses_keep_their_fields() -> None:
    part = split(Pair(Sentences(X, NAMES), X), 2)[1]
    assert part.x.names == ["c", "d"]
    assert part.x.scale == 0.5
    assert torch.equal(part.x.ids, X[2:4])


def test_a_special_mapping_keeps_what_it_knows_beside_its_items() -> None:
    encoding = Encoding({"input_ids": X})
    encoding.origin = "tokenizer"
    part = split(encoding, 4)[1]
    assert isinstance(part, Encoding)
    assert part.origin == "tokenizer"
    assert torch.equal(part["input_ids"], X[4:])
    assert torch.equal(encoding["input_ids"], X)


def test_a_tokenizer_output_stays_one() -> None:
    encoding = pytest.importorskip("transformers").BatchEncoding({"input_ids": X, "attention_mask": X > 0})
    part = split(encoding, 4)[0]
    assert type(part) is type(encoding)
    assert part.attention_mask.shape == (4, 2)


def test_a_read_only_mapping_becomes_a_dict() -> None:
    parts: list[object] = [*split(types.MappingProxyType({"x": X}), 5)]
    assert isinstance(parts[0], dict)


@pytest.mark.parametrize(
    "shared", [None, 3, 2.5, "mean", torch.tensor(4.0), np.float64(2.0), np.array(1), (), [], [None, None], object(), Sentences]
)
def test_what_has_no_entry_per_example_passes_through(shared: object) -> None:
    for part in split({"x": X, "shared": shared}, 2):
        assert part["shared"] is shared or part["shared"] == shared


def test_labels_left_as_numbers_are_cut_entry_by_entry() -> None:
    assert split([X, [0, 1, 2, 3, 4]], 3)[1][1] == [3, 4]


@pytest.mark.parametrize("batch", [X[:0], {"x": X[:0], "n": []}, [X[:0], ()], [], {"names": []}])
def test_an_empty_batch_has_no_part(batch: object) -> None:
    assert split(batch, 4) == []


@pytest.mark.parametrize(
    ("batch", "path"),
    [
        ({"x": X, "y": X[:3]}, r"batch\['y'\] has 3 entries but batch\['x'\] has 5"),
        ([X, [X, X[:1]]], r"batch\[1\]\[1\] has 1"),
        (Pair(Sentences(X, NAMES[:2]), X), r"batch\[0\]\.names has 2"),
        ({"x": X, "position_ids": X[:1]}, "Expand what all examples share"),
    ],
)
def test_columns_that_disagree_are_refused_by_path(batch: object, path: str) -> None:
    with pytest.raises(ShapeError, match=path):
        split(batch, 2)


@pytest.mark.parametrize("batch", [None, 3, {}, {"loss": torch.tensor(1.0)}, "abc"])
def test_a_batch_without_any_column_is_refused(batch: object) -> None:
    with pytest.raises(ShapeError, match="no column"):
        batch_size(batch)


@pytest.mark.parametrize("size", [0, -1, True, 2.5, "3"])
def test_a_size_that_counts_nothing_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match="size="):
        split(X, size)


def test_an_emptied_batch_keeps_structure_and_no_value() -> None:
    empty = empty_like({"x": X, "deep": (X.long(), ["a"] * 5), "scale": 2})
    assert empty["x"].shape == (0, 2)
    assert empty["deep"][0].dtype == torch.int64
    assert empty["deep"][1] == []
    assert empty["scale"] == 2
