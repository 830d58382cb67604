"""Mutants of the methods that look along one direction, or along singular vectors of a release: the audit must name each."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from audited import MakePrivate, batch_of, maker
from torch import Tensor

import lowkey as lk
from lowkey.audit import Check, mechanism
from lowkey.boundary import PerExample, Sensitive
from lowkey.factors import Dense

Patch = pytest.MonkeyPatch
CLIP, DPZERO, GALORE, GRADIENTS, NOISE, SLOTS = (
    importlib.import_module(f"lowkey.{name}")
    for name in ("release.clip", "methods.dpzero", "methods.naive_galore", "gradients", "release.noise", "optim.slots")
)


@dataclass(frozen=True)
class Mutant:
    """One way to break a method, and what the audit must find."""

    apply: Callable[[Patch], None]
    expected: Check
    run: MakePrivate
    dtype: torch.dtype = torch.float32


def direction_and_noise_share_a_key(patch: Patch) -> None:
    """The direction of a step is a stream that begins with the step's noise, so that a release can be divided by it."""
    secrets: list[bytes] = []
    renew = NOISE.DrawKeys._renew

    def renewed(self: Any) -> None:
        renew(self)
        secrets.append(self._secret)

    def draw(shape: tuple[int, ...], like: Tensor, key: tuple[Any, ...]) -> Tensor:
        drawn = torch.zeros(shape, dtype=like.dtype)
        if secrets:
            NOISE._add_philox(drawn, 1.0, NOISE.derive_key(secrets[-1], "system noise", key[2], key[2] - 1, 0))
        return drawn + (0.0 if secrets else 1.0)

    patch.setattr(NOISE.DrawKeys, "_renew", renewed)
    patch.setattr(DPZERO, "draw_signs", draw)


def slopes_with(change: Callable[[Tensor], Tensor]) -> Callable[[Patch], None]:
    probe = GRADIENTS.probe

    def changed(*arguments: Any, **options: Any) -> PerExample[Any]:
        found = probe(*arguments, **options)
        ((name, factor),) = found._blocks.items()
        return PerExample({name: Dense(change(factor.value))}, found._batch_size)

    return lambda patch: patch.setattr(GRADIENTS, "probe", changed)


def mean_of_the_microbatch(slopes: Tensor) -> Tensor:
    return slopes.nan_to_num(0.0, 0.0, 0.0).mean(0, keepdim=True).expand_as(slopes).clone() if len(slopes) else slopes


def signs_follow_the_batch(patch: Patch) -> None:
    take, draw = CLIP.ClippedSum.take, DPZERO.draw_signs
    sums: list[float] = []

    def leaking(self: Any) -> Sensitive:
        total = take(self)
        sums[:] = [float(block.sum()) for block in total._blocks.values()]
        return total

    patch.setattr(CLIP.ClippedSum, "take", leaking)
    patch.setattr(DPZERO, "draw_signs", lambda shape, like, key: draw(shape, like, (*key, *sums)))


def basis_from_the_sum_before_noise(patch: Patch) -> None:
    take, leading = CLIP.ClippedSum.take, GALORE._SingularBases._leading
    raw: list[dict[str, Tensor]] = [{}]

    def leaking(self: Any) -> Sensitive:
        total = take(self)
        raw[0] = {name: block.clone() for name, block in total._blocks.items()}
        return total

    def from_raw(self: Any, gradient: Tensor) -> Tensor:
        twin = next((block for block in raw[0].values() if block.shape == gradient.shape), gradient)
        return leading(self, twin + 1e-6 * torch.from_numpy(np.random.default_rng(0).standard_normal(twin.shape)).to(twin))

    patch.setattr(CLIP.ClippedSum, "take", leaking)
    patch.setattr(GALORE._SingularBases, "_leading", from_raw)


def released_gradient_is_projected_before_noise(patch: Patch) -> None:
    """The first step sketches with the singular vectors of its own sum."""
    take = CLIP.ClippedSum.take

    def projected(self: Any) -> Sensitive:
        total = take(self)
        for block in total._blocks.values():
            if block.dim() == 2 and min(block.shape) > 3 and bool(block.any()):
                vectors = torch.linalg.svd(block, full_matrices=False)[0][:, :3]
                block.copy_(vectors @ (vectors.T @ block) * 3.0)
        return total

    patch.setattr(CLIP.ClippedSum, "take", projected)


ZERO = maker(lk.DPZero(scale=1e-3))
NAIVE = maker(lk.NaiveGaLore(rank=3, refresh_every=1))
MUTANTS = {
    "direction and noise share a key": Mutant(
        direction_and_noise_share_a_key, Check.NOISE_INDEPENDENCE, maker(lk.DPZero(), dtype=torch.float64), torch.float64
    ),
    "slopes are not clipped": Mutant(
        lambda patch: patch.setattr(CLIP, "clip_weights", lambda squares, finite, bound: finite.to(squares.dtype)), Check.SENSITIVITY, ZERO
    ),
    "mean slope of the microbatch": Mutant(slopes_with(mean_of_the_microbatch), Check.SENSITIVITY, ZERO),
    "directions follow the batch": Mutant(signs_follow_the_batch, Check.POST_PROCESSING, ZERO),
    "basis from the sum before noise": Mutant(basis_from_the_sum_before_noise, Check.POST_PROCESSING, NAIVE),
    "projected on its own singular vectors before noise": Mutant(released_gradient_is_projected_before_noise, Check.SENSITIVITY, NAIVE),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_audit_names_what_a_mutant_breaks(name: str, monkeypatch: Patch) -> None:
    mutant = MUTANTS[name]
    mutant.apply(monkeypatch)
    result = mechanism(mutant.run, batch_of(dtype=mutant.dtype), num_coordinates=60_000)
    assert mutant.expected in {finding.check for finding in result.findings}, str(result)
