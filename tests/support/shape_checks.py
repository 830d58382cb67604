"""The run-time checker of array shapes that the tests load lowkey with."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

_ARRAY_ANNOTATION = re.compile(r"\b(Bool|Complex|Float|Inexact|Int|Integer|Key|Num|Real|Shaped|UInt)\d*\[")
_check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check_shapes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check the annotations of functions that name an array shape; pyright has seen the others.

    Checking every function would ask for run-time checkable protocols in the library, for the sake of its tests alone.
    """
    annotations = getattr(function, "__annotations__", {})
    if any(_ARRAY_ANNOTATION.search(str(annotation)) for annotation in annotations.values()):
        return _check(function)
    return function
