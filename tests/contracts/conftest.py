"""These tests run without shape checks, which the same code passes elsewhere and which take most of the time here."""

from __future__ import annotations

from collections.abc import Iterator

import jaxtyping
import pytest


@pytest.fixture(autouse=True, scope="module")
def _without_shape_checks() -> Iterator[None]:
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
