"""Mutants of denoising: the audit must see what looks past the noise, and the formula what is merely wrong."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from audited import PLAN, batch_of, maker
from dense_shrink import denoise_beside_its_formula
from dense_steps import NOISE
from torch import Tensor

import lowkey as lk
from lowkey.audit import Check, mechanism
from lowkey.boundary import Released, Sensitive

Patch = pytest.MonkeyPatch
AVERAGE, CLIP, DENOISE, DENOISING, SHRINK, SPIKED = (
    importlib.import_module(f"lowkey.{name}")
    for name in ("refine.average", "release.clip", "methods.denoise", "refine.denoising", "refine.shrink", "refine.spiked")
)
QUIET, NOISE_MULTIPLIER = dataclasses.replace(PLAN, noise_multiplier=0.05), 0.05


# -- what looks past the noise -----------------------------------------------------------------------------------------


def stash(patch: Patch) -> dict[str, Tensor]:
    """Keep every sum before it is noised, where it must not be."""
    take = CLIP.ClippedSum.take
    raw: dict[str, Tensor] = {}

    def leaking(self: Any) -> Sensitive:
        total = take(self)
        raw.update({name: block.clone() for name, block in total._blocks.items()})
        return total

    patch.setattr(CLIP.ClippedSum, "take", leaking)
    return raw


def refined_with(change: Callable[[Any, Released, Mapping[str, Tensor], Any], Released]) -> Callable[[Patch], None]:
    """Replace the refinement by one that sees the sum before its noise, in the units of the release."""

    def apply(patch: Patch) -> None:
        raw, refine = stash(patch), DENOISING.Denoising.refine

        def leaking(self: Any, released: Released) -> Released:
            return change(self, released, {name: block / QUIET.expected_batch_size for name, block in raw.items()}, refine)

        patch.setattr(DENOISING.Denoising, "refine", leaking)

    return apply


def fed_with_the_raw_sum(self: Any, released: Released, raw: Mapping[str, Tensor], refine: Any) -> Released:
    return refine(self, dataclasses.replace(released, blocks=raw))


def fed_with_one_raw_matrix(self: Any, released: Released, raw: Mapping[str, Tensor], refine: Any) -> Released:
    name = self._names[-1]
    return refine(self, dataclasses.replace(released, blocks={**released.blocks, name: raw[name]}))


def threshold_from_the_raw_sum(self: Any, released: Released, raw: Mapping[str, Tensor], refine: Any) -> Released:
    """Count a matrix as signal only if it was one before the noise."""
    self._kappa = 1.0 if float(torch.linalg.svdvals(raw[self._names[0]])[0]) > released.noise_std else 1e6
    return refine(self, released)


def rank_from_the_raw_sum(self: Any, released: Released, raw: Mapping[str, Tensor], refine: Any) -> Released:
    """Keep as many triplets of a shrunk matrix as the matrix had without noise."""
    blocks = dict(refine(self, released).blocks)
    for name in self._names:
        rank = int(torch.linalg.matrix_rank(raw[name]))
        left, values, right = torch.linalg.svd(blocks[name], full_matrices=False)
        blocks[name] = (left[:, :rank] * values[:rank]) @ right[:rank]
    return dataclasses.replace(released, blocks=blocks)


def norm_from_the_raw_sum(self: Any, released: Released, raw: Mapping[str, Tensor], refine: Any) -> Released:
    blocks = dict(refine(self, released).blocks)
    for name in self._names:
        blocks[name] = blocks[name] * (raw[name].norm() / blocks[name].norm())
    return dataclasses.replace(released, blocks=blocks)


LEAKS = {
    "raw sum shrunk": fed_with_the_raw_sum,
    "one raw matrix shrunk": fed_with_one_raw_matrix,
    "threshold from the raw sum": threshold_from_the_raw_sum,
    "rank from the raw sum": rank_from_the_raw_sum,
    "norm from the raw sum": norm_from_the_raw_sum,
}


@pytest.mark.parametrize(("name", "target"), [*((name, "gradient") for name in LEAKS), ("raw sum shrunk", "momentum")])
def test_the_audit_sees_what_looks_past_the_noise(name: str, target: str, monkeypatch: Patch) -> None:
    refined_with(LEAKS[name])(monkeypatch)
    result = mechanism(maker(lk.Denoise(kappa=1.0, target=target, decay=0.5), plan=QUIET), batch_of(), num_coordinates=20_000)
    assert Check.POST_PROCESSING in {finding.check for finding in result.findings}, str(result)


# -- what is merely wrong ----------------------------------------------------------------------------------------------


def noise_level_times(factor: float) -> Callable[[Patch], None]:
    def apply(patch: Patch) -> None:
        refine = DENOISING.Denoising.refine

        def wrong(self: Any, released: Released) -> Released:
            return refine(self, dataclasses.replace(released, noise_std=released.noise_std * factor))

        patch.setattr(DENOISING.Denoising, "refine", wrong)

    return apply


def level_of_one_release(patch: Patch) -> None:
    """Forget that averaging takes noise out."""
    patch.setattr(AVERAGE.MovingAverage, "noise_std", property(lambda self: NOISE_MULTIPLIER * 0.3 / NOISE.expected_batch_size))


def level_of_the_long_run(patch: Patch) -> None:
    """Forget that the average has just begun."""
    exact = AVERAGE.MovingAverage.noise_std.fget

    def limit(self: Any) -> float:
        # With w = 1 - decay^t the exact level has the factor sqrt((2 - w) / w).
        return exact(self) * (self._weight / (2.0 - self._weight)) ** 0.5

    patch.setattr(AVERAGE.MovingAverage, "noise_std", property(limit))


def average_without_correction(patch: Patch) -> None:
    patch.setattr(AVERAGE.MovingAverage, "means", lambda self: {name: total.clone() for name, total in self._sums.items()})


def edge_of_a_square(patch: Patch) -> None:
    patch.setattr(SHRINK, "bulk_edge", lambda shape, noise_std: SPIKED.bulk_edge((shape[0], shape[0]), noise_std))


def values_cut_and_not_shrunk(patch: Patch) -> None:
    patch.setattr(SHRINK, "shrunk_values", lambda observed, shape, noise_std: observed.double())


def values_of_the_signal(patch: Patch) -> None:
    """Undo the growth of the values, and forget that their vectors are turned."""
    patch.setattr(SHRINK, "shrunk_values", SPIKED.signal_values)


def always_detected(patch: Patch) -> None:
    check = SHRINK.triplets_above
    patch.setattr(SHRINK, "triplets_above", lambda matrices, edges, factor: check(matrices, edges, 1.0))


def norm_never_corrected(patch: Patch) -> None:
    shrunk = SHRINK._shrunk

    def uncorrected(matrix: Tensor, triplets: Any, noise_std: float, *, norm_correction: bool) -> Tensor:
        return shrunk(matrix, triplets, noise_std, norm_correction=False)

    patch.setattr(SHRINK, "_shrunk", uncorrected)


def one_layer_left_out(patch: Patch) -> None:
    plain = DENOISE._is_linear
    patch.setattr(DENOISE, "_is_linear", lambda spec: plain(spec) and spec.name != "body.0.weight")


WRONG = {
    "batch size forgotten": noise_level_times(NOISE.expected_batch_size),
    "divided by the batch size twice": noise_level_times(1.0 / NOISE.expected_batch_size),
    "clip norm forgotten": noise_level_times(1.0 / 0.3),
    "noise level 1 % high": noise_level_times(1.01),
    "edge of a square": edge_of_a_square,
    "cut, not shrunk": values_cut_and_not_shrunk,
    "values of the signal": values_of_the_signal,
    "norm never corrected": norm_never_corrected,
    "a layer left out": one_layer_left_out,
}
WRONG_AVERAGES = {
    "level of one release": level_of_one_release,
    "level of the long run": level_of_the_long_run,
    "no correction of the start": average_without_correction,
}
GRADIENT, MOMENTUM = lk.Denoise(kappa=1.1), lk.Denoise(kappa=1.1, target="momentum", decay=0.6)
CASES = [(name, WRONG[name], method) for name in WRONG for method in (GRADIENT, MOMENTUM)]
CASES += [(name, apply, MOMENTUM) for name, apply in WRONG_AVERAGES.items()]


def run(method: lk.Denoise) -> None:
    denoise_beside_its_formula(method, "MLP", "SGD", dataclasses.replace(NOISE, noise_multiplier=NOISE_MULTIPLIER))


@pytest.mark.parametrize(("apply", "method"), [case[1:] for case in CASES], ids=[f"{name}, {m.target.value}" for name, _, m in CASES])
def test_the_formula_sees_what_is_wrong(apply: Callable[[Patch], None], method: lk.Denoise, monkeypatch: Patch) -> None:
    run(method)
    apply(monkeypatch)
    with pytest.raises(AssertionError):
        run(method)


def test_the_threshold_is_seen_where_it_decides(monkeypatch: Patch) -> None:
    method = lk.Denoise(kappa=2.0)
    formula = denoise_beside_its_formula(method, "MLP", "SGD", dataclasses.replace(NOISE, noise_multiplier=NOISE_MULTIPLIER))
    assert 0 < formula.num_shrunk < 4 * 3
    always_detected(monkeypatch)
    with pytest.raises(AssertionError):
        run(method)
