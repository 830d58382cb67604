"""The run-time checker of array shapes that the tests load lowkey with."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from beartype import beartype

_ARRAY = re.compile(r"\b(Bool|Complex|Float|Inexact|Int|Integer|Key|Num|Real|Shaped|UInt)\d*\[")


def check_shapes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check the annotations that name the shape of an array, and leave the others to pyright.

    Checking them all would ask for run-time checkable protocols in the library, for the sake of its tests alone.
    """
    everything = getattr(function, "__annotations__", {})
    arrays = {name: annotation for name, annotation in everything.items() if _ARRAY.search(str(annotation))}
    if not arrays:
        return function
    function.__annotations__ = arrays
    checked = beartype(function)
    checked.__annotations__ = everything
    return checked
