"""Would the audit notice? Each mutant breaks one place of the real code, and the audit must name what it broke."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from audited import MakePrivate, Twice, batch_of, maker
from torch import Tensor

import lowkey as lk
from lowkey.audit import AuditResult, Check, mechanism
from lowkey.boundary import Released, Sensitive
from lowkey.factors.factor import Dense
from lowkey.sketch import OneSided

Patch = pytest.MonkeyPatch


def module(name: str) -> ModuleType:
    """Import a module whose name its package gives to a function."""
    return importlib.import_module(f"lowkey.{name}")


PRIVATIZE, CLIP, GAUSSIAN, NOISE = (module(name) for name in ("privatize", "release.clip", "release.gaussian", "release.noise"))
GRAPE, COLLECTOR, LEDGER, SLOTS = (module(name) for name in ("methods.grape", "factors.collector", "account.ledger", "optim.slots"))

DPSGD = lk.DPSGD()
SKETCHED = lk.Grape(rank=6, refresh_every=1)


@dataclass(frozen=True)
class Mutant:
    """One way to break the mechanism.

    Fields:
        apply: Patches the code.
        expected: What the audit must find, whatever else it finds.
        run: What is audited.
        word: A word of the finding's message.
    """

    apply: Callable[[Patch], None]
    expected: Check
    run: MakePrivate = field(default_factory=lambda: maker(DPSGD))
    word: str = ""
    dtype: torch.dtype = torch.float32


def audit(run: MakePrivate, dtype: torch.dtype = torch.float32) -> AuditResult:
    # 60,000 coordinates tell a standard deviation from one 5 % smaller, 15 standard deviations away.
    return mechanism(run, batch_of(dtype=dtype), num_coordinates=60_000)


# -- noise -------------------------------------------------------------------------------------------------------------


def scale_noise(factor: Callable[[int], float]) -> Callable[[Patch], None]:
    def apply(patch: Patch) -> None:
        def release(total: Sensitive, sigma: float, size: int, source: Any, step: int) -> Released:
            return GAUSSIAN.release_gaussian(total, sigma * factor(size), size, source, step)

        patch.setattr(PRIVATIZE, "release_gaussian", release)

    return apply


def one_block_takes_from_another(patch: Patch) -> None:
    """The total is right: the blocks are not."""

    def release(total: Sensitive, sigma: float, size: int, source: Any, step: int) -> Released:
        std = sigma * total.l2_bound
        for index, block in enumerate(total._blocks.values()):
            source.add_(block, std * (1.0 if index > 1 else 0.8 if index else math.sqrt(1 + 0.36 * 24 / 288)), step=step, index=index)
            block.div_(size)
        return Released(blocks=total._blocks, noise_std=std / size, l2_bound=total.l2_bound / size, step=step)

    patch.setattr(PRIVATIZE, "release_gaussian", release)


def last_block_is_not_noised(patch: Patch) -> None:
    def release(total: Sensitive, sigma: float, size: int, source: Any, step: int) -> Released:
        std = sigma * total.l2_bound
        for index, block in enumerate(total._blocks.values()):
            if index < len(total._blocks) - 1:
                source.add_(block, std, step=step, index=index)
            block.div_(size)
        return Released(blocks=total._blocks, noise_std=std / size, l2_bound=total.l2_bound / size, step=step)

    patch.setattr(PRIVATIZE, "release_gaussian", release)


def noise_at_every_backward(patch: Patch) -> None:
    add, backward, plain = CLIP.ClippedSum.add, PRIVATIZE.Private.backward, GAUSSIAN.release_gaussian
    sums: list[Any] = []

    def noted(self: Any, per_example: Any) -> None:
        add(self, per_example)
        sums[:] = [self]

    def noisy(self: Any, losses: Tensor) -> None:
        backward(self, losses)
        self.parts = getattr(self, "parts", 0) + 1
        step = self._ledger.num_intents + 1
        for index, name in enumerate(sums[0]._shapes):
            self._setting.noise.add_(sums[0]._block(name), sums[0].clip_norm, step=step, index=100 * self.parts + index)

    patch.setattr(CLIP.ClippedSum, "add", noted)
    patch.setattr(PRIVATIZE.Private, "backward", noisy)
    patch.setattr(PRIVATIZE, "release_gaussian", lambda total, sigma, size, source, step: plain(total, 0.0, size, source, step))


def keys(name_key: Callable[[bytes, str, int, int], bytes]) -> Callable[[Patch], None]:
    def apply(patch: Patch) -> None:
        patch.setattr(NOISE.DrawKeys, "next_key", lambda self, step, index: name_key(self._secret, self._purpose, step, index))

    return apply


def noise_from_step_and_index_alone(patch: Patch) -> None:
    def add_(self: Any, total: Tensor, std: float, *, step: int, index: int) -> None:
        generator = torch.Generator().manual_seed(1000 * step + index)
        total.add_(torch.randn(total.shape, generator=generator, dtype=total.dtype), alpha=std)

    patch.setattr(NOISE.SystemNoise, "add_", add_)


def noise_from_torch_global_seed(patch: Patch) -> None:
    def add_(self: Any, total: Tensor, std: float, *, step: int, index: int) -> None:
        total.add_(torch.randn_like(total), alpha=std)

    patch.setattr(NOISE.SystemNoise, "add_", add_)


def noise_is_uniform(patch: Patch) -> None:
    def add_(self: Any, total: Tensor, std: float, *, step: int, index: int) -> None:
        draw = np.random.default_rng().uniform(-math.sqrt(3), math.sqrt(3), total.shape)
        total.add_(torch.from_numpy(np.asarray(draw)).to(total.dtype), alpha=std)

    patch.setattr(NOISE.SystemNoise, "add_", add_)


def noise_is_not_centred(patch: Patch) -> None:
    add_ = NOISE.SystemNoise.add_

    def shifted(self: Any, total: Tensor, std: float, *, step: int, index: int) -> None:
        add_(self, total, std, step=step, index=index)
        total.add_(0.05 * std)

    patch.setattr(NOISE.SystemNoise, "add_", shifted)


def noise_and_basis_share_a_key(patch: Patch) -> None:
    secrets: list[bytes] = []
    renew = NOISE.DrawKeys._renew

    def renewed(self: Any) -> None:
        renew(self)
        secrets.append(self._secret)

    def draw_basis(distribution: object, width: int, rank: int, key: object) -> Tensor:
        drawn = torch.zeros(width, rank, dtype=torch.float64)
        NOISE._add_philox(drawn, rank**-0.5, NOISE.derive_key(secrets[-1] if secrets else bytes(32), "system noise", 1, 0, 0))
        return drawn

    patch.setattr(NOISE.DrawKeys, "_renew", renewed)
    patch.setattr(GRAPE, "draw_basis", draw_basis)


# -- clipping and summing ----------------------------------------------------------------------------------------------


def weights(clip: Callable[[Tensor, Tensor, float], Tensor]) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(CLIP, "clip_weights", clip)


REAL_WEIGHTS = CLIP.clip_weights
REAL_SQUARES = CLIP.ClippedSum._squared_norms


def unclipped(squares: Tensor, finite: Tensor, clip_norm: float) -> Tensor:
    return finite.to(squares.dtype)


def blocks_clipped_apart(patch: Patch) -> None:
    def add(self: Any, per_example: Any) -> None:
        for name, factor in per_example._blocks.items():
            squares = factor.squared_norms().to(self.dtype)
            finite = torch.isfinite(squares)
            factor.without(~finite).add_sum(self._block(name), REAL_WEIGHTS(squares, finite, self.clip_norm))

    patch.setattr(CLIP.ClippedSum, "add", add)


def clipped_after_the_sum(patch: Patch) -> None:
    take = CLIP.ClippedSum.take

    def clipped(self: Any) -> Sensitive:
        total = take(self)
        norm = math.sqrt(sum(float(block.square().sum()) for block in total._blocks.values()))
        for block in total._blocks.values():
            block.mul_(min(1.0, self.clip_norm / max(norm, 1e-30)))
        return total

    patch.setattr(CLIP, "clip_weights", unclipped)
    patch.setattr(CLIP.ClippedSum, "take", clipped)


def microbatch_mean_before_clipping(patch: Patch) -> None:
    def add(self: Any, per_example: Any) -> None:
        means = {name: factor.dense().mean(0) for name, factor in per_example._blocks.items()}
        squares = sum(mean.square().sum() for mean in means.values())
        weight = REAL_WEIGHTS(squares[None], torch.isfinite(squares[None]), self.clip_norm)[0]
        for name, mean in means.items():
            self._block(name).add_(mean.nan_to_num(0.0) * weight * per_example._batch_size)

    patch.setattr(CLIP.ClippedSum, "add", add)


def add_with(prepare: Callable[[Any, dict[str, Any], Tensor], dict[str, Any] | None]) -> Callable[[Patch], None]:
    """Replace what happens between the norms and the sum."""

    def add(self: Any, per_example: Any) -> None:
        squares = self._squared_norms(per_example._blocks, per_example._batch_size)
        factors = prepare(self, dict(per_example._blocks), squares)
        for name, factor in (factors or {}).items():
            finite = torch.isfinite(squares) if factors else torch.zeros(0)
            factor.add_sum(self._block(name), REAL_WEIGHTS(squares, finite, self.clip_norm))

    return lambda patch: patch.setattr(CLIP.ClippedSum, "add", add)


def skip_if_not_finite(self: Any, factors: dict[str, Any], squares: Tensor) -> dict[str, Any] | None:
    return factors if bool(torch.isfinite(squares).all()) else None


def norms_with(change: Callable[[Any, dict[str, Any], int], Tensor]) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(CLIP.ClippedSum, "_squared_norms", change)


@dataclass(frozen=True)
class Apart:
    """Several uses of one weight, whose norm forgets the products between them."""

    uses: list[Any]

    def squared_norms(self) -> Tensor:
        return torch.stack([use.squared_norms() for use in self.uses]).sum(0)

    def add_sum(self, total: Tensor, weights: Tensor) -> None:
        for use in self.uses:
            use.add_sum(total, weights)

    def without(self, bad: Tensor) -> Apart:
        return Apart([use.without(bad) for use in self.uses])


class LateSketch(OneSided):
    """Hands the whole gradient to the clipping, and is applied to the sum."""

    late: dict[str, OneSided] = {}  # noqa: RUF012 - the one registry of this mutant

    @property
    def blocks(self) -> dict[str, tuple[int, ...]]:
        return {self.name: self.shape}

    def basis(self, axis: Any) -> None:
        return None

    def compress(self, outer: Any, kept: Any) -> dict[str, Any]:
        return {self.name: outer}

    def compress_dense(self, gradients: Tensor) -> dict[str, Dense]:
        return {self.name: Dense(gradients)}

    def decode(self, blocks: Any) -> Tensor:
        block = blocks[self.name]
        coordinates = OneSided.compress_dense(self, block[None])[self.name].value[0] if block.shape == self.shape else block
        return OneSided.decode(self, {self.name: coordinates})


def clipped_before_the_sketch(patch: Patch) -> None:
    draw, take = GRAPE._RandomBases._draw, CLIP.ClippedSum.take

    def late(self: Any, spec: Any, axis: Any, drawn: Any) -> Any:
        sketch = draw(self, spec, axis, drawn)
        if isinstance(sketch, OneSided):
            sketch = LateSketch(sketch.name, sketch.shape, sketch.axis, sketch.matrix, sketch.provenance)
            LateSketch.late[sketch.name] = sketch
        return sketch

    def sketched(self: Any) -> Sensitive:
        total = take(self)
        blocks = {
            name: OneSided.compress_dense(LateSketch.late[name], block[None])[name].value[0] if name in LateSketch.late else block
            for name, block in total._blocks.items()
        }
        return Sensitive(blocks, total.l2_bound)

    patch.setattr(LateSketch, "late", {})
    patch.setattr(GRAPE._RandomBases, "_draw", late)
    patch.setattr(CLIP.ClippedSum, "take", sketched)


def divided_by_the_drawn_size(patch: Patch) -> None:
    add, take = CLIP.ClippedSum.add, CLIP.ClippedSum.take
    drawn = [0]

    def counting(self: Any, per_example: Any) -> None:
        drawn[0] += per_example._batch_size
        add(self, per_example)

    def release(total: Sensitive, sigma: float, size: int, source: Any, step: int) -> Released:
        count, drawn[0] = drawn[0] or size, 0
        return GAUSSIAN.release_gaussian(total, sigma, count, source, step)

    def fresh(self: Any) -> Sensitive:
        return take(self)

    patch.setattr(CLIP.ClippedSum, "add", counting)
    patch.setattr(CLIP.ClippedSum, "take", fresh)
    patch.setattr(PRIVATIZE, "release_gaussian", release)


def sum_is_kept_for_the_next_step(patch: Patch) -> None:
    def take(self: Any) -> Sensitive:
        return Sensitive({name: self._block(name).clone() for name in self._shapes}, self.clip_norm)

    patch.setattr(CLIP.ClippedSum, "take", take)


def clip_norm_follows_the_examples(patch: Patch) -> None:
    take, squared = CLIP.ClippedSum.take, REAL_SQUARES

    def norms(self: Any, factors: Any, batch_size: int) -> Tensor:
        squares = squared(self, factors, batch_size)
        self.next = 0.9 * self.clip_norm if bool((squares > self.clip_norm**2).any()) else self.clip_norm
        return squares

    def adapted(self: Any) -> Sensitive:
        total = take(self)
        self.clip_norm = getattr(self, "next", self.clip_norm)
        return total

    patch.setattr(CLIP.ClippedSum, "_squared_norms", norms)
    patch.setattr(CLIP.ClippedSum, "take", adapted)


# -- after the bar -----------------------------------------------------------------------------------------------------


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


def after_the_step(change: Callable[[Any, dict[str, Tensor]], None]) -> Callable[[Patch], None]:
    def apply(patch: Patch) -> None:
        kept, step = stash(patch), SLOTS.Slots.step

        def leaking(self: Any, released: Released) -> None:
            step(self, released)
            with torch.no_grad():
                change(self, kept[0])

        patch.setattr(SLOTS.Slots, "step", leaking)

    return apply


def raw_sum_is_stepped(slots: Any, raw: dict[str, Tensor]) -> None:
    name = next(iter(raw))
    slots._parameters[name].sub_(raw[name], alpha=1e-2)


def raw_sum_reaches_a_moment(slots: Any, raw: dict[str, Tensor]) -> None:
    name = next(iter(raw))
    slots.optimizer.state[slots._slots[name]]["exp_avg_sq"].add_(raw[name].square())


def gradient_stays(slots: Any, raw: dict[str, Tensor]) -> None:
    name = next(iter(raw))
    slots._parameters[name].grad = raw[name]


def frozen_weight_moves(patch: Patch) -> None:
    step = PRIVATIZE.Private.step

    def moving(self: Any) -> Any:
        report = step(self)
        with torch.no_grad():
            next(parameter for parameter in self._model.parameters() if not parameter.requires_grad).mul_(0.999)
        return report

    patch.setattr(PRIVATIZE.Private, "step", moving)


def buffer_takes_a_statistic(patch: Patch) -> None:
    backward = PRIVATIZE.Private.backward

    def recording(self: Any, run: Callable[[], Tensor]) -> None:
        losses = run()
        backward(self, losses)
        with torch.no_grad():
            self._model.shift.fill_(float(losses.nan_to_num(0.0, 0.0, 0.0).mean()))

    patch.setattr(PRIVATIZE.Private, "backward", recording)


def basis_from_the_batch(patch: Patch) -> None:
    kept, draw = stash(patch), GRAPE.draw_basis

    def draw_basis(distribution: Any, width: int, rank: int, key: tuple[object, ...]) -> Tensor:
        sizes = tuple(float(block.double().norm()) for block in kept[0].values()) if kept else ()
        return draw(distribution, width, rank, (*key, *sizes))

    patch.setattr(GRAPE, "draw_basis", draw_basis)


def empty_batch_is_skipped(patch: Patch) -> None:
    add, step = CLIP.ClippedSum.add, PRIVATIZE.Private.step
    added: list[bool] = []

    def noted(self: Any, per_example: Any) -> None:
        add(self, per_example)
        added.append(True)

    def skipping(self: Any) -> Any:
        if not added:
            return None
        added.clear()
        return step(self)

    patch.setattr(CLIP.ClippedSum, "add", noted)
    patch.setattr(PRIVATIZE.Private, "step", skipping)


# -- the ledger --------------------------------------------------------------------------------------------------------


def charged_after_the_noise(patch: Patch) -> None:
    def commit(self: Any, step: int) -> None:
        self._num_intents = step

    patch.setattr(LEDGER.MemoryLedger, "intend", lambda self: self._num_intents + 1)
    patch.setattr(LEDGER.MemoryLedger, "commit", commit)


def charged(times: int) -> Callable[[Patch], None]:
    def apply(patch: Patch) -> None:
        def intend(self: Any) -> int:
            self._num_intents += times
            self.made = getattr(self, "made", 0) + 1
            return self.made

        patch.setattr(LEDGER.MemoryLedger, "intend", intend)
        patch.setattr(LEDGER.MemoryLedger, "commit", lambda self, step: None)

    return apply


def charged_as(rate: float = 1.0, sigma: float = 1.0) -> Callable[[Patch], None]:
    def entry(header: Any, num_intents: int) -> tuple[float, float, int]:
        return header.plan.sampling_rate * rate, header.plan.noise_multiplier * sigma, num_intents

    return lambda patch: patch.setattr(LEDGER, "history_entry", entry)


def nothing(patch: Patch) -> None:
    """The code is right; the loss is not."""


def mean_over_batch(model: Any, batch: Any) -> Tensor:
    losses = torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return losses / len(losses)


def contrast(model: Any, batch: Any) -> Tensor:
    outputs = model(batch["x"])
    return (outputs @ outputs.mean(0)).tanh()


MUTANTS = {
    "noise divided twice": Mutant(scale_noise(lambda size: 1.0 / size), Check.NOISE_SCALE),
    "noise on the mean": Mutant(scale_noise(lambda size: float(size)), Check.NOISE_SCALE),
    "sigma 5 % low": Mutant(scale_noise(lambda size: 0.95), Check.NOISE_SCALE),
    "noise halved": Mutant(scale_noise(lambda size: 0.5), Check.NOISE_SCALE),
    "one block's noise at another's cost": Mutant(one_block_takes_from_another, Check.NOISE_SCALE, word="body.0.bias"),
    "no noise on the last block": Mutant(last_block_is_not_noised, Check.COVERAGE, word="body.5.bias"),
    "noise at every backward": Mutant(noise_at_every_backward, Check.INVARIANCE),
    "one noise for two tensors": Mutant(
        keys(lambda secret, purpose, step, index: NOISE.derive_key(secret, purpose, step, 0, 0)), Check.NOISE_INDEPENDENCE, word="body"
    ),
    "same noise every step": Mutant(
        keys(lambda secret, purpose, step, index: NOISE.derive_key(secret, purpose, 0, 0, index)), Check.NOISE_INDEPENDENCE, word="step"
    ),
    "same noise in every run": Mutant(noise_from_step_and_index_alone, Check.NOISE_INDEPENDENCE, word="step"),
    "noise follows torch.manual_seed": Mutant(noise_from_torch_global_seed, Check.NOISE_INDEPENDENCE, word="step"),
    "noise is uniform": Mutant(noise_is_uniform, Check.NOISE_SHAPE, word="normal law"),
    "noise is not centred": Mutant(noise_is_not_centred, Check.NOISE_SHAPE, word="mean"),
    "noise and basis share a key": Mutant(
        noise_and_basis_share_a_key,
        Check.NOISE_INDEPENDENCE,
        maker(lk.Grape(rank=6), dtype=torch.float64),
        word="basis",
        dtype=torch.float64,
    ),
    "no clip": Mutant(weights(unclipped), Check.SENSITIVITY),
    "clip at 2 C": Mutant(weights(lambda squares, finite, bound: REAL_WEIGHTS(squares, finite, 2.0 * bound)), Check.SENSITIVITY),
    "clip 1 % too far": Mutant(weights(lambda squares, finite, bound: REAL_WEIGHTS(squares, finite, 1.01 * bound)), Check.SENSITIVITY),
    "blocks clipped apart": Mutant(blocks_clipped_apart, Check.SENSITIVITY),
    "clip after the sum": Mutant(clipped_after_the_sum, Check.SENSITIVITY),
    "clip before the sketch": Mutant(clipped_before_the_sketch, Check.SENSITIVITY, maker(SKETCHED)),
    "microbatch mean before clipping": Mutant(microbatch_mean_before_clipping, Check.INVARIANCE),
    "NaN example poisons": Mutant(add_with(lambda total, factors, squares: factors), Check.NOT_FINITE),
    "Inf example skips the step": Mutant(add_with(skip_if_not_finite), Check.NOT_FINITE),
    "norm in bfloat16": Mutant(
        norms_with(lambda total, factors, size: REAL_SQUARES(total, factors, size).bfloat16().to(total.dtype)), Check.SENSITIVITY
    ),
    "bias forgotten by the norm": Mutant(
        norms_with(lambda total, factors, size: REAL_SQUARES(total, {n: f for n, f in factors.items() if "bias" not in n}, size)),
        Check.SENSITIVITY,
    ),
    "uses of a weight normed apart": Mutant(
        lambda patch: patch.setattr(COLLECTOR, "combine", lambda uses: uses[0] if len(uses) == 1 else Apart(uses)),
        Check.SENSITIVITY,
        maker(DPSGD, model=Twice),
    ),
    "division by the drawn size": Mutant(divided_by_the_drawn_size, Check.ISOLATION),
    "sum kept for the next step": Mutant(sum_is_kept_for_the_next_step, Check.CARRY_OVER),
    "clip norm follows the examples": Mutant(clip_norm_follows_the_examples, Check.CARRY_OVER),
    "raw sum stepped": Mutant(after_the_step(raw_sum_is_stepped), Check.POST_PROCESSING, word="moved differently"),
    "raw sum in a moment": Mutant(after_the_step(raw_sum_reaches_a_moment), Check.POST_PROCESSING, word="state"),
    "gradient left on a parameter": Mutant(after_the_step(gradient_stays), Check.SIDE_EFFECTS, word=".grad"),
    "frozen weight moves": Mutant(frozen_weight_moves, Check.SIDE_EFFECTS, word="frozen"),
    "buffer takes a statistic": Mutant(buffer_takes_a_statistic, Check.SIDE_EFFECTS, word="shift"),
    "basis from the batch": Mutant(basis_from_the_batch, Check.POST_PROCESSING, maker(SKETCHED)),
    "empty batch skipped": Mutant(empty_batch_is_skipped, Check.EMPTY_BATCH),
    "charged after the noise": Mutant(charged_after_the_noise, Check.LEDGER, word="before it was charged"),
    "never charged": Mutant(charged(0), Check.LEDGER, word="0 times"),
    "charged twice": Mutant(charged(2), Check.LEDGER, word="2 times"),
    "charged for more noise": Mutant(charged_as(sigma=1.1), Check.LEDGER, word="noise multiplier"),
    "charged at a lower rate": Mutant(charged_as(rate=0.5), Check.LEDGER, word="sampling rate"),
    "loss divided by the batch": Mutant(nothing, Check.ISOLATION, maker(DPSGD, loss=mean_over_batch)),
    "loss that couples examples": Mutant(nothing, Check.ISOLATION, maker(DPSGD, loss=contrast)),
    "loss that couples, unchecked": Mutant(
        nothing, Check.ISOLATION, maker(DPSGD, loss=contrast, execution=lk.Execution(check_isolation=lk.CheckIsolation.NEVER))
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_audit_names_what_a_mutant_breaks(name: str, monkeypatch: Patch) -> None:
    mutant = MUTANTS[name]
    mutant.apply(monkeypatch)
    result = audit(mutant.run, mutant.dtype)
    assert any(finding.check is mutant.expected and mutant.word in finding.message for finding in result.findings), str(result)


def test_a_charge_for_more_noise_than_was_added_shows_in_the_noise(monkeypatch: Patch) -> None:
    charged_as(sigma=1.1)(monkeypatch)
    assert Check.NOISE_SCALE in {finding.check for finding in audit(maker(DPSGD)).findings}


# -- what no audit of a small model can show ---------------------------------------------------------------------------


def clipped_length(weights: Tensor, outer: Any) -> float:
    """Return the true length of what a clip norm of 1 lets through."""
    rows, cols = outer.rows.double(), outer.cols.double()
    return float(weights[0]) * float((rows.transpose(1, 2) @ cols)[0].norm())


def nearly_cancelling(scale: float, seed: int = 2) -> Any:
    """Return an example whose many terms cancel, all but a last one in float32's noise."""
    factor = module("factors.factor")
    generator = torch.Generator().manual_seed(seed)
    rows, cols = torch.randn(1, 64, 8, generator=generator), torch.randn(1, 64, 8, generator=generator)
    rows = torch.cat([rows, -rows * (1 + scale)], dim=1)
    return factor.Outer(rows, torch.cat([cols, cols], dim=1), (8, 8))


@pytest.mark.parametrize("scale", [1e-2, 1e-3, 3e-4, 1e-4, 1e-5])
def test_terms_that_cancel_never_raise_the_bound(scale: float) -> None:
    outer = nearly_cancelling(scale)
    squares = outer.squared_norms() * 1e8
    assert clipped_length(REAL_WEIGHTS(squares, torch.isfinite(squares), 1.0) * 1e4, outer) <= 1.0 + 1e-5


def test_without_the_margin_terms_that_cancel_would_raise_the_bound() -> None:
    lengths = []
    for seed in range(40):  # the rounding of a single one may happen to fall on the safe side
        outer = nearly_cancelling(3e-4, seed)
        products = (outer.rows @ outer.rows.transpose(1, 2)) * (outer.cols @ outer.cols.transpose(1, 2))
        squares = products.sum((1, 2)).clamp_min(0.0) * 1e8
        lengths.append(clipped_length(REAL_WEIGHTS(squares, torch.isfinite(squares), 1.0) * 1e4, outer))
    assert max(lengths) > 1.01
