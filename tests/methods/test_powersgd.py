"""PowerSGD against its formula, dense and in float64, on noisy releases."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from dense_steps import (
    NO_NOISE,
    NOISE,
    OPTIMIZERS,
    SUBJECTS,
    Gradients,
    assert_same_weights,
    clipped_mean,
    dense_gradients,
    take,
    trained,
    twins,
)
from torch import Tensor

import lowkey as lk
from lowkey.boundary import Released
from lowkey.refine import PowerSteps
from lowkey.sketch.power_method import draw_carriers

RANK, SEED = 2, 1
MATRICES = {
    "MLP": ["body.0.weight", "body.3.weight", "body.5.weight"],
    "used twice": ["layer.weight", "head.weight"],
    "convolutions": ["first.weight", "second.weight", "head.weight"],
    "input-first": ["up.weight", "down.weight", "head.weight"],
}


class DensePowerSGD:
    """One power iteration on the release plus the error so far, with projectors in place of factors."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.lost: dict[str, Tensor] = {}
        self.columns: dict[str, Tensor] = {}

    def __call__(self, released: Gradients) -> Gradients:
        return {name: self.approximate(name, block) if name in self.names else block for name, block in released.items()}

    def approximate(self, name: str, block: Tensor) -> Tensor:
        wanted = block.flatten(1) + self.lost.get(name, 0.0)
        start = self.columns.get(name)
        if start is None:
            start = draw_carriers(*wanted.shape, RANK, (SEED, "power", name))[1].T
        product = wanted @ start
        onto = product @ torch.linalg.inv(product.T @ product) @ product.T
        found = onto @ wanted
        # The next start spans what the approximation's rows span.
        self.columns[name] = torch.linalg.svd(found)[2][:RANK].T
        self.lost[name] = wanted - found
        return found.view_as(block)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("subject", SUBJECTS)
def test_powersgd_is_its_formula_on_the_releases(subject: str, optimizer: str) -> None:
    build, batch = SUBJECTS[subject]
    model, dense = twins(build)
    formula, releases = DensePowerSGD(MATRICES[subject]), []
    stepper = OPTIMIZERS[optimizer](list(trained(dense).values()))
    options: Any = {"plan": NOISE, "clip_norm": 0.3, "seed": SEED, "noise": lk.SeededNoise(3)}
    with lk.privatize(model, OPTIMIZERS[optimizer], method=lk.PowerSGD(rank=RANK), **options) as private:
        private.on_release(lambda released: releases.append({name: block.clone() for name, block in released.blocks.items()}))
        for step in range(4):
            take(private, model, batch)
            for name, gradient in formula(releases[step]).items():
                trained(dense)[name].grad = gradient
            stepper.step()
    assert_same_weights(model, dense)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_without_noise_and_limit_it_is_its_formula_on_the_mean_gradient(subject: str) -> None:
    build, batch = SUBJECTS[subject]
    model, dense = twins(build)
    formula, stepper = DensePowerSGD(MATRICES[subject]), OPTIMIZERS["AdamW"](list(trained(dense).values()))
    method = lk.PowerSGD(rank=RANK)
    with lk.privatize(model, OPTIMIZERS["AdamW"], method=method, plan=NO_NOISE, clip_norm=math.inf, seed=SEED) as private:
        for _ in range(4):
            take(private, model, batch)
            means = clipped_mean(dense_gradients(dense, batch), math.inf, NO_NOISE.expected_batch_size)
            for name, gradient in formula(means).items():
                trained(dense)[name].grad = gradient
            stepper.step()
    assert_same_weights(model, dense, 1e-6)


def release(step: int, *shape: int) -> Released:
    generator = torch.Generator().manual_seed(step)
    block = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return Released(blocks={"w": block, "b": block[0].clone()}, noise_std=0.1, l2_bound=1.0, step=step)


def steps(*shape: int) -> PowerSteps:
    return PowerSteps({"w": torch.randn(torch.Size(shape[1:]).numel(), RANK, generator=torch.Generator().manual_seed(0)).double()})


@pytest.mark.parametrize("shape", [(6, 5), (6, 3, 2, 2)])
def test_what_is_lost_comes_back_with_the_next_releases(shape: tuple[int, ...]) -> None:
    refining = steps(*shape)
    given, returned = torch.zeros(shape).double(), torch.zeros(shape).double()
    for step in range(1, 6):
        one = release(step, *shape)
        given += one.blocks["w"]
        refined = refining.refine(one)
        returned += refined.blocks["w"]
        assert int(torch.linalg.matrix_rank(refined.blocks["w"].flatten(1))) == RANK
        assert torch.equal(refined.blocks["b"], one.blocks["b"])
        assert (refined.step, refined.noise_std) == (step, 0.1)
    lost: Any = refining.state_dict()["lost"]
    torch.testing.assert_close(returned + lost["w"].view(shape), given)


def test_a_release_is_left_as_it_was() -> None:
    refining = steps(6, 5)
    for step in (1, 2):
        one = release(step, 6, 5)
        before = one.blocks["w"].clone()
        refining.refine(one)
        assert torch.equal(one.blocks["w"], before)


def test_its_state_goes_on_where_it_was_saved() -> None:
    first, second = steps(6, 5), steps(6, 5)
    first.refine(release(1, 6, 5))
    second.load_state_dict(first.state_dict())
    for step in (2, 3):
        found, expected = (refining.refine(release(step, 6, 5)).blocks["w"] for refining in (second, first))
        assert torch.equal(found, expected)


def test_a_rank_that_is_no_count_is_refused() -> None:
    with pytest.raises(lk.ConfigError, match="rank=0"):
        lk.PowerSGD(rank=0)
