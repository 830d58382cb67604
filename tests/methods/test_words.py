"""A method prints as the call that makes it, for a statement shows it to people who do not read Python's own notation of choices."""

from __future__ import annotations

import pytest

import lowkey as lk

METHODS = [
    lk.Grape(rank=4, side="smaller", on_refresh="rotate"),
    lk.RGP(rank=4, carriers="left", basis="random"),
    lk.Denoise(target="momentum"),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_a_method_prints_as_the_call_that_makes_it(method: object) -> None:
    assert eval(repr(method), dict(vars(lk))) == method
