"""Clip each example's joint vector, and sum."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lowkey.boundary import PerExample, Sensitive
from lowkey.errors import ConfigError
from lowkey.factors import Factor
from lowkey.release.arithmetic import in_full_precision


@dataclass(frozen=True, kw_only=True)
class ClipGroup:
    """Blocks that are clipped by a joint norm of their own.

    Fields:
        blocks: Their names.
        share: The group's limit, as a part of the clip norm.

    Guarantee:
        Groups whose shares have squares that add up to one keep the clip norm as the bound over all of them:
        an example moves group g by at most `share_g * clip_norm`, and the squares of these add up.
    """

    blocks: frozenset[str]
    share: float


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

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        clip_norm: float,
        dtype: torch.dtype,
        device: torch.device,
        groups: Sequence[ClipGroup] = (),
    ) -> None:
        self.clip_norm = clip_norm
        self._groups = tuple(groups)
        self.dtype, self._device = dtype, device
        self._total: dict[str, Tensor] = {}
        self.set_shapes(shapes)

    def set_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Sum other blocks from the next step on."""
        _check_groups(self._groups, shapes)
        self._shapes = dict(shapes)

    def add(self, per_example: PerExample[Factor]) -> None:
        """Clip every example of a microbatch and add it; the microbatch is consumed, block by block."""
        # PRIVACY: a norm in one precision and a sum in another would not fit together.
        with in_full_precision(self._device):
            self._add(*_open(per_example))

    def _add(self, factors: dict[str, Factor], batch_size: int) -> None:
        # PRIVACY: one joint norm over all blocks of a group; clipping them apart would allow sqrt(number of blocks) times the bound.
        groups = self._grouped(factors)
        squares = [self._squared_norms(part, batch_size) for part, _ in groups]
        finite = torch.isfinite(squares[0]) if len(squares) == 1 else torch.isfinite(torch.stack(squares)).all(0)
        if not bool(finite.all()):
            # PRIVACY: an example that is not finite contributes exactly zero, and nothing else changes.
            groups = [({name: factor.without(~finite) for name, factor in part.items()}, share) for part, share in groups]
        factors.clear()
        try:
            for (part, share), square in zip(groups, squares, strict=True):
                weights = clip_weights(square, finite, share * self.clip_norm)
                for name in list(part):
                    # PRIVACY: only clipped examples are ever summed; a microbatch has no mean of its own.
                    part.pop(name).add_sum(self._block(name), weights)
        except BaseException:
            # PRIVACY: some blocks hold this microbatch and others do not; adding it again would count it twice, so all is dropped.
            self._total = {}
            raise

    def _grouped(self, factors: Mapping[str, Factor]) -> list[tuple[dict[str, Factor], float]]:
        if not self._groups:
            return [(dict(factors), 1.0)]
        return [({name: factor for name, factor in factors.items() if name in group.blocks}, group.share) for group in self._groups]

    def take(self) -> Sensitive:
        """Return the sum since the last call, and start again from zero."""
        blocks = {name: self._block(name) for name in self._shapes}
        self._total = {}
        return Sensitive(blocks, self.clip_norm)

    def _squared_norms(self, factors: Mapping[str, Factor], batch_size: int) -> Float[Tensor, " B"]:
        squares = torch.zeros(batch_size, dtype=self.dtype, device=self._device)
        for factor in factors.values():
            squares += factor.squared_norms().to(self.dtype)
        return squares

    def _block(self, name: str) -> Tensor:
        if name not in self._total:
            self._total[name] = torch.zeros(self._shapes[name], dtype=self.dtype, device=self._device)
        return self._total[name]


def _open(per_example: PerExample[Factor]) -> tuple[dict[str, Factor], int]:
    """Take a microbatch's factors out, leaving it empty."""
    # PRIVACY: the only place where per-example values are read; what leaves this file is a clipped sum.
    blocks = dict(per_example._blocks)  # pyright: ignore[reportPrivateUsage] # reason: release opens what it bounds
    batch_size = per_example._batch_size  # pyright: ignore[reportPrivateUsage] # reason: release opens what it bounds
    per_example._blocks = {}  # pyright: ignore[reportPrivateUsage] # reason: release opens what it bounds
    return blocks, batch_size


def _check_groups(groups: Sequence[ClipGroup], shapes: Mapping[str, tuple[int, ...]]) -> None:
    if not groups:
        return
    names = sorted(name for group in groups for name in group.blocks)
    if names != sorted(shapes):
        raise ConfigError(
            f"the clip groups hold the blocks {names[:5]}, and the sketches fill {sorted(shapes)[:5]}. "
            "Each block must be in exactly one group, or its examples would have no limit. Let the groups partition the sketches' blocks."
        )
    # PRIVACY: limits of separate groups add up in squares; the whole must stay within the clip norm that noise and statement go by.
    total = sum(group.share**2 for group in groups)
    if total > 1.0 + 1e-9 or any(not group.share > 0 for group in groups):
        raise ConfigError(
            f"the clip groups have shares {[group.share for group in groups]}, whose squares add up to {total:g}. "
            "They must be positive and add up to one at most, for an example moves the release by their root. Divide them by the root."
        )


def clip_weights(squares: Float[Tensor, " B"], finite: Bool[Tensor, " B"], clip_norm: float) -> Float[Tensor, " B"]:
    """Return `min(1, clip_norm / norm)` per example, and zero for an example that is not finite."""
    if math.isinf(clip_norm):
        return finite.to(squares.dtype)
    norms = squares.sqrt()
    weights = clip_norm / norms.clamp_min(clip_norm)
    return torch.where(finite, weights, torch.zeros_like(weights))
