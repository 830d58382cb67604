"""DPZero from its formula: central differences of each example's loss, one joint limit, one number released."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from audited import batch_of, cross_entropy
from dense_steps import NO_NOISE, NOISE, OPTIMIZERS, SUBJECTS, trained, twins
from torch import Tensor, nn

import lowkey as lk

SCALE = 1e-3


def slopes(model: nn.Module, batch: dict[str, Tensor], direction: dict[str, Tensor]) -> Tensor:
    """Take each example's loss at both points, one example at a time."""
    named = trained(model)
    weights = {name: parameter.detach().clone() for name, parameter in named.items()}
    found = []
    for row in range(len(batch["y"])):
        one = {key: value[row : row + 1] for key, value in batch.items()}
        losses = []
        for sign in (1.0, -1.0):
            moved = {name: weight + sign * SCALE * direction[name] for name, weight in weights.items()}
            logits = torch.func.functional_call(model, moved, (one["x"],))
            losses.append(nn.functional.cross_entropy(logits, one["y"]))
        found.append((losses[0] - losses[1]) / (2 * SCALE))
    return torch.stack(found).detach()


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("clip_norm", [0.05, math.inf])
def test_dpzero_is_its_formula(subject: str, optimizer: str, clip_norm: float) -> None:
    build, batch = SUBJECTS[subject]
    model, dense = twins(build)
    stepper = OPTIMIZERS[optimizer](list(trained(dense).values()))
    with lk.privatize(model, OPTIMIZERS[optimizer], method=lk.DPZero(scale=SCALE), plan=NO_NOISE, clip_norm=clip_norm, seed=1) as private:
        for _ in range(3):
            direction = {name: sketch.matrix[0].clone() for name, sketch in private.sketches.items()}
            private.backward(functools.partial(cross_entropy, model, batch))
            private.step()
            found = slopes(dense, batch, direction)
            released = (found * (clip_norm / found.abs()).clamp_max(1.0)).sum() / NO_NOISE.expected_batch_size
            for name, parameter in trained(dense).items():
                parameter.grad = released * direction[name]
            stepper.step()
    for mine, theirs in zip(model.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-9)


def test_a_direction_has_entries_of_one_and_is_new_in_every_step() -> None:
    build, batch = SUBJECTS["MLP"]
    model = twins(build)[0]
    with lk.privatize(model, OPTIMIZERS["SGD"], method=lk.DPZero(), plan=NOISE, clip_norm=1.0, seed=1) as private:
        first = torch.cat([sketch.matrix.flatten() for sketch in private.sketches.values()])
        private.backward(lambda: cross_entropy(model, batch))
        private.step()
        second = torch.cat([sketch.matrix.flatten() for sketch in private.sketches.values()])
    assert set(first.tolist()) == {1.0, -1.0}
    # 1,172 independent signs agree within 5 standard deviations of no agreement; so do they with their own mean.
    assert abs(float((first * second).mean())) < 5 / len(first) ** 0.5
    assert abs(float(first.mean())) < 5 / len(first) ** 0.5


def test_the_weights_are_the_very_same_after_a_backward() -> None:
    model = twins(SUBJECTS["MLP"][0])[0].float()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with lk.privatize(model, OPTIMIZERS["SGD"], method=lk.DPZero(), plan=NOISE, clip_norm=1.0) as private:
        private.backward(lambda: cross_entropy(model, batch_of()))

        def fails() -> Tensor:
            raise KeyError("an error of the user's own")

        with pytest.raises(KeyError):
            private.backward(fails)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_dropout_is_the_same_at_both_points() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 64), nn.Dropout(0.5), nn.Linear(64, 4)).double()
    plan = lk.Plan(noise_multiplier=0.0, delta=1e-3, num_examples=100, expected_batch_size=5, num_steps=1)
    released: list[float] = []
    with lk.privatize(model, OPTIMIZERS["SGD"], method=lk.DPZero(scale=1e-6), plan=plan, clip_norm=math.inf, seed=0) as private:
        private.on_release(lambda release: released.append(float(next(iter(release.blocks.values())))))
        private.backward(lambda: cross_entropy(model, batch_of(dtype=torch.float64)))
        private.step()
    # Two masks would differ by the losses' own size, divided by the distance of the two points.
    assert abs(released[0]) < 1e3


@pytest.mark.parametrize("run", [lambda model: cross_entropy(model, batch_of()), lambda model: 1.0], ids=["losses", "a number"])
def test_losses_that_were_taken_already_are_refused(run: Callable[[nn.Module], object]) -> None:
    model = twins(SUBJECTS["MLP"][0])[0].float()
    with lk.privatize(model, OPTIMIZERS["SGD"], method=lk.DPZero(), plan=NOISE, clip_norm=1.0) as private:
        with pytest.raises(lk.ConfigError, match="lambda"):
            private.backward(run(model))
        assert private.num_steps_left == NOISE.num_steps


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan, "1", True])
def test_a_scale_that_is_no_distance_is_refused(scale: object) -> None:
    with pytest.raises(lk.ConfigError, match="scale"):
        lk.DPZero(scale=scale)


def test_without_the_check_no_gradient_is_ever_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = twins(SUBJECTS["MLP"][0])[0].float(), batch_of()
    never = lk.Execution(check_isolation=lk.CheckIsolation.NEVER)
    with lk.privatize(model, OPTIMIZERS["SGD"], method=lk.DPZero(), plan=NOISE, clip_norm=1.0, execution=never) as private:
        monkeypatch.setattr(torch.autograd, "backward", lambda *_, **__: pytest.fail("a backward pass was run"))
        private.backward(lambda: cross_entropy(model, batch))
        assert private.step().step == 1
