"""Checks on a real batch that each row belongs to the example it is credited to, and that no example touches another.

Scaling loss `b` by a power of two must scale example `b`'s gradient in every operation by exactly that power.
A batch norm, a contrastive loss, a balancing term or a batch axis in the wrong place all break this.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowkey.errors import UnsupportedLayerError

Norms = Sequence[tuple[str, Tensor]]
"""(parameter, squared norm per example) of every use of a parameter in one backward pass."""

_POWERS = tuple(power for power in range(-6, 7) if power)
"""Never zero: every loss is changed, so what does not change with it is no gradient."""
_VANISHING = 1e-30
"""Squared norms up to here are margins for underflow rather than gradients; nothing can be learned from them."""


@dataclass(frozen=True, kw_only=True)
class _Noise:
    """How far squared norms of one computation may differ between two runs, relative to themselves and to the whole gradient."""

    relative: float
    floor: float


_ORDERED = _Noise(relative=1e-3, floor=0.0)
# NUMERICS: an accelerator adds in another order each time, so what is zero but for rounding, as an attention's key bias, never repeats.
_UNORDERED = _Noise(relative=2e-2, floor=1e-6)


def isolation_weights(losses: Tensor) -> Tensor:
    """Return one power of two per loss, a fixed pattern, for it need not be secret; a dozen examples have a dozen powers."""
    exponents = [_POWERS[b % len(_POWERS)] for b in range(len(losses))]
    # Shuffled, so that examples in another order, or neighbours exchanged, are told apart.
    random.Random(len(losses)).shuffle(exponents)
    return torch.tensor([2.0**exponent for exponent in exponents], dtype=losses.dtype, device=losses.device)


def check_isolation(weights: Tensor, weighted: Norms, plain: Norms) -> set[str]:
    """Compare the norms of a backward pass over weighted losses with those of the plain one.

    Returns:
        The parameters for which the comparison could tell: those with a gradient from two examples or more.
        A layer behind weights that start at zero has none yet.

    Raises:
        UnsupportedLayerError: Some example's gradient did not scale with its own loss.
    """
    squares = weights.square()
    noise = _ORDERED if weights.device.type == "cpu" else _UNORDERED
    whole = torch.stack([base.double() for _, base in plain]).nan_to_num(0.0, 0.0).sum(0) * squares.double() if plain else squares
    shown: set[str] = set()
    for (name, found), (_, base) in zip(weighted, plain, strict=True):
        expected = base * squares.to(base.dtype)
        # NUMERICS: powers of two scale exactly; the tolerance is for sums that are reordered and norms that cancel.
        slack = noise.relative * expected + 1e-9 * expected.nan_to_num(0.0, 0.0).amax() + noise.floor * whole.to(base.dtype) + _VANISHING
        # NUMERICS: a zero gradient beside huge inputs has a margin for underflow as its norm, which no factor on the losses changes.
        told = torch.isfinite(expected) & torch.isfinite(found) & (found != base)
        if int((told & (base > _VANISHING)).sum()) > 1:
            shown.add(name)
        if bool(((found - expected).abs() > slack)[told].any()):
            raise UnsupportedLayerError(
                f"the gradient of '{name}' for one example changes when another example's loss is scaled, so examples are mixed. "
                "Each loss must depend on its own example alone, and the first axis of every input must be the examples'. "
                "Look for batch statistics, in-batch negatives, balancing losses, or a batch axis that is not first."
            )
    return shown
