"""What a private value refuses to tell, and what a public one says of itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lowkey.boundary import PerExample, Public, Sensitive
from lowkey.errors import PrivacyBoundaryError

SECRET = torch.tensor([[41.0, 42.0]])


def each() -> PerExample[Any]:
    return PerExample({"weight": SECRET}, 1)


def total() -> Sensitive:
    return Sensitive({"weight": SECRET}, 0.5)


@pytest.mark.parametrize("value", [each(), total()], ids=["examples", "sum"])
@pytest.mark.parametrize("read", [bool, len, float], ids=["bool", "len", "float"])
def test_a_private_value_is_not_read_before_noise(value: Any, read: Callable[[Any], object]) -> None:
    with pytest.raises((PrivacyBoundaryError, TypeError), match=r"before noise was added|float\(\) argument"):
        read(value)


def test_a_private_value_prints_public_facts_alone() -> None:
    assert repr(each()) == "PerExample(1 blocks, values hidden)"
    assert repr(total()) == "Sensitive(l2_bound=0.5, shapes={'weight': (1, 2)}, values hidden)"


def loss() -> None:
    """Stand for a loss that is never called."""


ROWS = torch.zeros(3, 2)


@pytest.mark.parametrize(
    ("examples", "count"),
    [(ROWS, 3), ({"x": ROWS}, 3), ({}, 0), ((ROWS, torch.zeros(3)), 3), ([1, 2], 2), ([], 0)],
    ids=["tensor", "columns", "no columns", "tuple of columns", "list", "empty list"],
)
def test_public_examples_print_their_number(examples: Any, count: int) -> None:
    assert repr(Public(examples, loss)) == f"Public({count} examples, loss=loss)"
