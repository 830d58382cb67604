"""How far two releases are apart, and how much of it rounding explains."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def distance(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """Return the L2 distance over all blocks together; infinite if the blocks differ or hold anything that is not finite."""
    if first.keys() != second.keys() or any(block.shape != second[name].shape for name, block in first.items()):
        return math.inf
    squares = sum(float((block.double() - second[name].double()).square().sum()) for name, block in first.items())
    return math.sqrt(squares) if math.isfinite(squares) else math.inf


def rounding(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """Return how far apart rounding alone may put two releases with the same noise."""
    # NUMERICS: a sum is rounded where it meets its noise and where it is divided, each time by at most half a unit in the last place.
    return 4.0 * math.hypot(
        *(torch.finfo(block.dtype).eps * float(block.double().norm()) for blocks in (first, second) for block in blocks.values())
    )


def is_finite(blocks: Mapping[str, Tensor]) -> bool:
    """Return whether a release holds numbers only."""
    return all(bool(torch.isfinite(block).all()) for block in blocks.values())
