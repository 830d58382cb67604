"""Would anyone notice? Broken variants of the methods with carriers, for the audit or the formula to name."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from audited import Layer, batch_of, cross_entropy, maker
from dense_steps import NO_NOISE, clipped_mean, dense_gradients, twins
from torch import Tensor

import lowkey as lk
from lowkey.audit import Check, mechanism
from lowkey.boundary import Released, Sensitive
from lowkey.sketch.carriers import Carriers, Core

Patch = pytest.MonkeyPatch
CLIP, RGP = (importlib.import_module(f"lowkey.{name}") for name in ("release.clip", "methods.rgp"))
POWER, LORA = (importlib.import_module(f"lowkey.{name}") for name in ("refine.power", "methods.lora"))

BOTH = maker(lk.RGP(rank=3, warmup_steps=1))
ADAPTERS = maker(lk.LoRA(rank=3))


@dataclass(frozen=True)
class Mutant:
    """One way to break a method: what is patched, what the audit must find, in which run."""

    apply: Callable[[Patch], None]
    expected: Check
    run: Any


def stash(patch: Patch) -> list[dict[str, Tensor]]:
    """Keep every sum before it is noised, where it must not be."""
    take = CLIP.ClippedSum.take
    kept: list[dict[str, Tensor]] = []

    def leaking(self: Any) -> Sensitive:
        total = take(self)
        kept[:] = [{name: block.clone() for name, block in total._blocks.items()}]
        return total

    patch.setattr(CLIP.ClippedSum, "take", leaking)
    return kept


def carriers_clipped_apart(patch: Patch) -> None:
    def grouped(self: Any, factors: dict[str, Any]) -> list[tuple[dict[str, Any], float]]:
        left = {name: factor for name, factor in factors.items() if name.endswith(".left")}
        return [(left, 1.0), ({name: factor for name, factor in factors.items() if name not in left}, 1.0)]

    patch.setattr(CLIP.ClippedSum, "_grouped", grouped)


def the_right_block_is_not_in_the_norm(patch: Patch) -> None:
    norms = CLIP.ClippedSum._squared_norms

    def fewer(self: Any, factors: dict[str, Any], size: int) -> Tensor:
        return norms(self, {name: factor for name, factor in factors.items() if not name.endswith(".right")}, size)

    patch.setattr(CLIP.ClippedSum, "_squared_norms", fewer)


def the_core_is_in_the_norm_of_neither(patch: Patch) -> None:
    """Clip as if the blocks were isometric, and release them as if they were not."""
    right = Carriers._right_block

    def norm_without_core(self: Any, outer: Any) -> Any:
        factor, freed = right(self, outer), right(dataclasses.replace(self, core=Core.LEFT_ONLY), outer)
        return _Understated(factor, freed)

    patch.setattr(Carriers, "_right_block", norm_without_core)


class _Understated:
    """A factor with another one's norm."""

    def __init__(self, real: Any, shown: Any) -> None:
        self._real, self._shown = real, shown
        self.numel, self.add_sum, self.dense = real.numel, real.add_sum, real.dense

    def squared_norms(self) -> Tensor:
        return self._shown.squared_norms()

    def without(self, bad: Tensor) -> _Understated:
        return _Understated(self._real.without(bad), self._shown.without(bad))


def carriers_of_the_sum(patch: Patch) -> None:
    """Follow the gradient that was just released, as it was before its noise."""
    kept, follow = stash(patch), RGP._HistoricalCarriers._followed

    def followed(self: Any, name: str, step: int) -> Tensor:
        if step == 1:
            return follow(self, name, step)
        spec = self._start.specs[name]
        sketch = self._sketches[name]
        return sketch.decode({block: kept[0][block] for block in sketch.blocks}).view(spec.matrix_shape)

    patch.setattr(RGP._HistoricalCarriers, "_followed", followed)


def error_of_the_sum(patch: Patch) -> None:
    """Feed back what the approximation lost of the sum, not of the release."""
    kept, refine = stash(patch), POWER.PowerSteps.refine

    def refined(self: Any, released: Released) -> Released:
        found = refine(self, released)
        for name in self._lost:
            self._lost[name] = kept[0][name] / 10 - found.blocks[name]
        return found

    patch.setattr(POWER.PowerSteps, "refine", refined)


def adapters_follow_the_sum(patch: Patch) -> None:
    """Move the weight by an adapter that has also seen the sum before its noise."""
    kept, move = stash(patch), LORA._Adapter.move

    def moved(self: Any, weight: Tensor, proxies: Any) -> None:
        for block, proxy in proxies.items():
            proxy.sub_(kept[0][block], alpha=1e-3)
        move(self, weight, proxies)

    patch.setattr(LORA._Adapter, "move", moved)


def adapters_that_have_moved(patch: Patch) -> None:
    """Start with a B that is not zero, as in a later step: at zero, A has no gradient that could be clipped wrongly."""
    make = LORA._adapter

    def moved(*given: Any) -> Any:
        adapter = make(*given)
        adapter._left = torch.randn(adapter._left.shape, generator=torch.Generator().manual_seed(0))
        adapter.sketch = adapter._derivative()
        return adapter

    patch.setattr(LORA, "_adapter", moved)


def test_adapters_that_have_moved_keep_their_promise(monkeypatch: Patch) -> None:
    adapters_that_have_moved(monkeypatch)
    assert mechanism(ADAPTERS, batch_of(), num_coordinates=4_000).passed


def a_is_not_in_the_norm(patch: Patch) -> None:
    adapters_that_have_moved(patch)
    the_right_block_is_not_in_the_norm(patch)


MUTANTS = {
    "RGP: L and R clipped apart": Mutant(carriers_clipped_apart, Check.SENSITIVITY, BOTH),
    "RGP: Y not in the norm": Mutant(the_right_block_is_not_in_the_norm, Check.SENSITIVITY, BOTH),
    "RGP: norm of the isometric blocks": Mutant(the_core_is_in_the_norm_of_neither, Check.SENSITIVITY, BOTH),
    "RGP: carriers from the batch": Mutant(carriers_of_the_sum, Check.POST_PROCESSING, BOTH),
    "PowerSGD: error of the un-noised sum": Mutant(error_of_the_sum, Check.POST_PROCESSING, maker(lk.PowerSGD(rank=3))),
    "LoRA: B and A clipped apart": Mutant(carriers_clipped_apart, Check.SENSITIVITY, ADAPTERS),
    "LoRA: A not in the norm": Mutant(a_is_not_in_the_norm, Check.SENSITIVITY, ADAPTERS),
    "LoRA: adapters from the batch": Mutant(adapters_follow_the_sum, Check.POST_PROCESSING, ADAPTERS),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_audit_names_what_a_mutant_breaks(name: str, monkeypatch: Patch) -> None:
    mutant = MUTANTS[name]
    mutant.apply(monkeypatch)
    result = mechanism(mutant.run, batch_of(), num_coordinates=4_000)
    assert mutant.expected in {finding.check for finding in result.findings}, str(result)


# -- what only a formula can show --------------------------------------------------------------------------------------


def plus_in_the_core(patch: Patch) -> None:
    def decode(self: Any, blocks: Any) -> Tensor:
        x, y = (blocks[name] for name in self.blocks)
        left, right = self.left.to(x.dtype), self.right.to(x.dtype)
        return (x @ right + left @ y + left @ left.T @ x @ right).view(self.shape)

    patch.setattr(Carriers, "decode", decode)


def no_core_at_all(patch: Patch) -> None:
    def decode(self: Any, blocks: Any) -> Tensor:
        x, y = (blocks[name] for name in self.blocks)
        return (x @ self.right.to(x.dtype) + self.left.to(x.dtype) @ y).view(self.shape)

    patch.setattr(Carriers, "decode", decode)


def carriers_not_orthonormal(patch: Patch) -> None:
    find = RGP.power_iteration
    patch.setattr(RGP, "power_iteration", lambda *given: tuple(1.1 * side for side in find(*given)))


def history_without_its_start(patch: Patch) -> None:
    """Follow the weight where the history is asked for."""
    patch.setattr(RGP._HistoricalCarriers, "_followed", lambda self, name, step: self._start.weights[name].detach().flatten(1))


def two_steps_are_projections() -> bool:
    """Step along gradients projected on what the leading singular vectors span: of the weight first, of the first update then."""
    model, dense = twins(Layer)
    batch, first = batch_of(dtype=torch.float64), dense.body.weight.detach().clone()
    method = lk.RGP(rank=2, warmup_steps=1, power_iterations=60)
    with lk.privatize(model, functools.partial(torch.optim.SGD, lr=0.1), method=method, plan=NO_NOISE, clip_norm=float("inf")) as private:
        for _ in range(2):
            private.backward(cross_entropy(model, batch))
            private.step()
            weight = dense.body.weight.detach()
            followed = weight if torch.equal(weight, first) else weight - first
            u, _, v = torch.linalg.svd(followed)
            out, of = u[:, 2:] @ u[:, 2:].T, v[2:].T @ v[2:]
            gradient = clipped_mean(dense_gradients(dense, batch), float("inf"), NO_NOISE.expected_batch_size)["body.weight"]
            with torch.no_grad():
                dense.body.weight -= 0.1 * (gradient - out @ gradient @ of)
    return bool((model.body.weight - dense.body.weight).abs().max() < 1e-4)


FORMULA_MUTANTS = {
    "plus in the core": plus_in_the_core,
    "core counted twice": no_core_at_all,
    "carriers not orthonormal": carriers_not_orthonormal,
    "weight in place of history": history_without_its_start,
}


def test_the_formula_holds() -> None:
    assert two_steps_are_projections()


@pytest.mark.parametrize("name", FORMULA_MUTANTS)
def test_the_formula_tells_a_mutant(name: str, monkeypatch: Patch) -> None:
    FORMULA_MUTANTS[name](monkeypatch)
    assert not two_steps_are_projections()


def test_the_core_left_uncounted_would_let_an_example_through() -> None:
    """What the isometric form saves is a factor of the root of two at most: an example inside both spans is held twice."""
    torch.manual_seed(0)
    left, right = torch.linalg.qr(torch.randn(6, 2))[0], torch.linalg.qr(torch.randn(5, 2))[0].T
    inside = (left @ torch.randn(2, 2) @ right)[None]
    norms = {}
    for core in (Core.SUBTRACTED, Core.LEFT_ONLY):
        sketch = Carriers(name="w", shape=(6, 5), left=left, right=right, provenance=lk.Provenance.RANDOM, core=core)
        norms[core] = float(sum(block.squared_norms() for block in sketch.compress_dense(inside).values()))
    assert norms[Core.SUBTRACTED] == pytest.approx(2 * norms[Core.LEFT_ONLY])
