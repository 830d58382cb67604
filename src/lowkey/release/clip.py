"""Clip each example's joint vector, and sum."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lowkey.boundary import PerExample, Sensitive
from lowkey.factors import Factor
from lowkey.release.arithmetic import in_full_precision


class ClippedSum:
    """The running sum of clipped examples between two releases.

    Life cycle: `add` as often as there are microbatches, `take` once, then again. An `add` that fails on its way empties the sum.

    Guarantee:
        Adding or removing one example moves the sum by at most `clip_norm` in L2 norm over all blocks together,
        whatever the example is, NaN and infinity included.
        In floating point the bound holds up to rounding: about 1e-6 of the clip norm for the example itself in float32, and the last digit
        of the sum, which is 6e-8 of the sum's own norm.

    Assumes:
        Each example is added once between two calls of `take`.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], clip_norm: float, dtype: torch.dtype, device: torch.device) -> None:
        self.clip_norm = clip_norm
        self._shapes = dict(shapes)
        self._dtype, self._device = dtype, device
        self._total: dict[str, Tensor] = {}

    def set_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Sum other blocks from the next step on."""
        self._shapes = dict(shapes)

    def add(self, per_example: PerExample[Factor]) -> None:
        """Clip every example of a microbatch and add it; the microbatch is consumed, block by block."""
        # PRIVACY: a norm in one precision and a sum in another would not fit together.
        with in_full_precision(self._device):
            self._add(*_open(per_example))

    def _add(self, factors: dict[str, Factor], batch_size: int) -> None:
        # PRIVACY: one joint norm over every trained coordinate; clipping blocks apart would allow sqrt(number of blocks) times the bound.
        squares = self._squared_norms(factors, batch_size)
        finite = torch.isfinite(squares)
        if not bool(finite.all()):
            # PRIVACY: an example that is not finite contributes exactly zero, and nothing else changes.
            factors = {name: factor.without(~finite) for name, factor in factors.items()}
        weights = clip_weights(squares, finite, self.clip_norm)
        try:
            for name in list(factors):
                # PRIVACY: only clipped examples are ever summed; a microbatch has no mean of its own.
                factors.pop(name).add_sum(self._block(name), weights)
        except BaseException:
            # PRIVACY: some blocks hold this microbatch and others do not; adding it again would count it twice, so all is dropped.
            self._total = {}
            raise

    def take(self) -> Sensitive:
        """Return the sum since the last call, and start again from zero."""
        blocks = {name: self._block(name) for name in self._shapes}
        self._total = {}
        return Sensitive(blocks, self.clip_norm)

    def _squared_norms(self, factors: Mapping[str, Factor], batch_size: int) -> Float[Tensor, " B"]:
        squares = torch.zeros(batch_size, dtype=self._dtype, device=self._device)
        for factor in factors.values():
            squares += factor.squared_norms().to(self._dtype)
        return squares

    def _block(self, name: str) -> Tensor:
        if name not in self._total:
            self._total[name] = torch.zeros(self._shapes[name], dtype=self._dtype, device=self._device)
        return self._total[name]


def _open(per_example: PerExample[Factor]) -> tuple[dict[str, Factor], int]:
    """Take a microbatch's factors out, leaving it empty."""
    # PRIVACY: the only place where per-example values are read; what leaves this file is a clipped sum.
    blocks = dict(per_example._blocks)  # pyright: ignore[reportPrivateUsage] # reason: release opens what it bounds
    batch_size = per_example._batch_size  # pyright: ignore[reportPrivateUsage] # reason: release opens what it bounds
    per_example._blocks = {}  # pyright: ignore[reportPrivateUsage] # reason: release opens what it bounds
    return blocks, batch_size


def clip_weights(squares: Float[Tensor, " B"], finite: Bool[Tensor, " B"], clip_norm: float) -> Float[Tensor, " B"]:
    """Return `min(1, clip_norm / norm)` per example, and zero for an example that is not finite."""
    if math.isinf(clip_norm):
        return finite.to(squares.dtype)
    norms = squares.sqrt()
    weights = clip_norm / norms.clamp_min(clip_norm)
    return torch.where(finite, weights, torch.zeros_like(weights))
