"""GEP against its formula, dense and in float64, and its two limits."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from audited import batch_of, cross_entropy, maker
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
from torch import Tensor, nn

import lowkey as lk

RANK, EVERY, RATIO = 3, 2, 0.4


def public_like(batch: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shape = (7, *batch["x"].shape[1:])
    return {"x": torch.randn(*shape, generator=generator, dtype=torch.float64), "y": torch.randint(0, 3, (7,), generator=generator)}


class DenseGEP:
    """Each example's embedding and residual, clipped apart to limits of `bound / sqrt(2)` and `RATIO` times that."""

    def __init__(self, model: nn.Module, public: Any, bound: float) -> None:
        self.model, self.public, self.limit = model, public, bound / math.sqrt(2)
        self.directions: dict[str, Tensor] = {}

    def renew(self) -> None:
        for name, rows in dense_gradients(self.model, self.public).items():
            flat = rows.flatten(1)
            width = flat.shape[1]
            vectors = torch.linalg.eigh(flat.T @ flat)[1][:, -RANK:]
            # A parameter that the rank covers is embedded whole.
            self.directions[name] = torch.eye(width, dtype=torch.float64) if width <= RANK else vectors.T

    def mean(self, number: int, batch: Any) -> Gradients:
        if (number - 1) % EVERY == 0:
            self.renew()
        rows = {name: value.flatten(1) for name, value in dense_gradients(self.model, batch).items()}
        inside = {name: value @ self.directions[name].T for name, value in rows.items()}
        outside = {name: value - inside[name] @ self.directions[name] for name, value in rows.items()}
        size = NO_NOISE.expected_batch_size
        embedding, residual = clipped_mean(inside, self.limit, size), clipped_mean(outside, RATIO * self.limit, size)
        return {
            name: (embedding[name] @ self.directions[name] + residual[name]).view(weight.shape)
            for name, weight in trained(self.model).items()
        }


@pytest.mark.parametrize("bound", [math.inf, 3.0, 0.1])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("subject", ["convolutions", "input-first"])
def test_a_step_is_its_formula(subject: str, optimizer: str, bound: float) -> None:
    build, batch = SUBJECTS[subject]
    model, dense = twins(build)
    examples = public_like(batch)
    method = lk.GEP(public=lk.Public(examples, cross_entropy), rank=RANK, refresh_every=EVERY, residual_ratio=RATIO)
    reference, stepper = DenseGEP(dense, examples, bound), OPTIMIZERS[optimizer](list(trained(dense).values()))
    with lk.privatize(model, OPTIMIZERS[optimizer], method=method, plan=NO_NOISE, clip_norm=bound) as private:
        for number in range(1, 5):
            take(private, model, batch)
            for name, gradient in reference.mean(number, batch).items():
                trained(dense)[name].grad = gradient
            stepper.step()
    assert_same_weights(model, dense, 1e-7)


def test_small_parameters_are_embedded_whole_and_the_others_split() -> None:
    method = lk.GEP(public=lk.Public(batch_of(40), cross_entropy), rank=24)
    private, _ = maker(method)(lk.SeededNoise(0))
    with private:
        whole = {name for name, sketch in private.sketches.items() if sketch.is_identity}
        blocks = {name: shape for sketch in private.sketches.values() for name, shape in sketch.blocks.items()}
    assert whole == {"body.0.bias", "body.2.weight", "body.2.bias", "body.5.bias"}
    assert blocks["body.0.weight.coordinates"] == (24,)
    assert blocks["body.0.weight.residual"] == (24, 12)


# -- two limits --------------------------------------------------------------------------------------------------------


def release_of(method: Any, scale: float) -> dict[str, Tensor]:
    """The sum that one example makes, without noise."""
    private, loss = maker(method, dtype=torch.float64, plan=NO_NOISE)(lk.SeededNoise(0))
    found: dict[str, Tensor] = {}
    with private:
        private.on_release(lambda release: found.update({name: block.clone() for name, block in release.blocks.items()}))
        private.backward(loss(batch_of(1, dtype=torch.float64)) * scale)
        private.step()
    return {name: block * NO_NOISE.expected_batch_size for name, block in found.items()}


def length(blocks: dict[str, Tensor], outside: bool) -> float:
    return math.sqrt(sum(float(block.square().sum()) for name, block in blocks.items() if name.endswith(".residual") == outside))


@pytest.mark.parametrize("ratio", [0.1, 0.4, 1.0, 3.0])
def test_an_example_fills_both_limits_and_no_more_than_the_clip_norm(ratio: float) -> None:
    method = lk.GEP(public=lk.Public(batch_of(8, dtype=torch.float64), cross_entropy), rank=3, residual_ratio=ratio)
    blocks = release_of(method, 1e6)
    # The clip norm of these runs is 0.7; the residual is released in units of its own limit over the embedding's.
    assert length(blocks, outside=False) == pytest.approx(0.7 / math.sqrt(2), rel=1e-9)
    assert length(blocks, outside=True) * ratio == pytest.approx(ratio * 0.7 / math.sqrt(2), rel=1e-9)
    assert math.hypot(length(blocks, outside=False), length(blocks, outside=True)) == pytest.approx(0.7, rel=1e-9)


@pytest.mark.parametrize("ratio", [0.1, 0.4, 1.0, 3.0])
def test_the_two_parts_compose_to_the_plans_noise_multiplier(ratio: float) -> None:
    sigma, clip_norm = 1.3, 0.7
    first_limit = clip_norm / math.sqrt(2)
    first_noise, second_noise = sigma * clip_norm, sigma * clip_norm * ratio
    # Two Gaussian mechanisms on one example are one, whose squared ratios of limit to noise add up.
    together = math.sqrt((first_limit / first_noise) ** 2 + (ratio * first_limit / second_noise) ** 2)
    assert 1 / together == pytest.approx(sigma, rel=1e-12)
    assert first_noise / first_limit == pytest.approx(math.sqrt(2) * sigma, rel=1e-12)


def test_the_noise_of_the_residual_is_the_ratio_times_that_of_the_embedding() -> None:
    method = lk.GEP(public=lk.Public(batch_of(8), cross_entropy), rank=8, residual_ratio=0.25)
    inside, outside = 0.0, 0.0
    releases: list[Any] = []
    private, _ = maker(method)(lk.SeededNoise(0))
    with private:
        private.on_release(releases.append)
        for _ in range(100):
            sketch = private.sketches["body.3.weight"]
            private.step()
            names = list(sketch.blocks)
            parts = [{name: block * (name == kept) for name, block in releases[-1].blocks.items()} for kept in names]
            inside += float(sketch.decode(parts[0]).square().sum()) / 8 / 100
            outside += float(sketch.decode(parts[1]).square().mean()) / 100
    # 800 and 76,800 squares of normals: five standard deviations are 25 % and 2.6 %; the seed is fixed.
    assert inside == pytest.approx(0.07**2, rel=0.25)
    assert outside == pytest.approx((0.25 * 0.07) ** 2, rel=0.026)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.0, -1.0, math.inf, math.nan, "a"])
def test_a_ratio_is_positive_and_finite(ratio: Any) -> None:
    with pytest.raises(lk.ConfigError, match="residual_ratio"):
        lk.GEP(public=lk.Public(batch_of(8), cross_entropy), rank=2, residual_ratio=ratio)


def test_a_model_without_a_parameter_above_the_rank_is_refused() -> None:
    method = lk.GEP(public=lk.Public(batch_of(8), cross_entropy), rank=7)
    sgd = functools.partial(torch.optim.SGD, lr=1.0)
    with pytest.raises(lk.ConfigError, match="rank=7 is not below the size of any parameter"):
        lk.privatize(nn.Linear(3, 2), sgd, method=method, plan=NOISE, clip_norm=1.0)


def test_tied_weights_are_split_as_one() -> None:
    class Tied(nn.Module):
        """An embedding that is the head as well."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(9, 5)

        def forward(self, inputs: Tensor) -> Tensor:
            return nn.functional.linear(torch.tanh(self.embedding(inputs)).mean(1), self.embedding.weight)

    generator = torch.Generator().manual_seed(1)
    batch, public = (
        {"x": torch.randint(0, 9, (5, 4), generator=generator), "y": torch.randint(0, 9, (5,), generator=generator)} for _ in range(2)
    )
    model, dense = twins(Tied)
    method = lk.GEP(public=lk.Public(public, cross_entropy), rank=RANK, refresh_every=EVERY, residual_ratio=RATIO)
    reference, stepper = DenseGEP(dense, public, 0.1), OPTIMIZERS["SGD"](list(trained(dense).values()))
    with lk.privatize(model, OPTIMIZERS["SGD"], method=method, plan=NO_NOISE, clip_norm=0.1) as private:
        for number in range(1, 4):
            take(private, model, batch)
            trained(dense)["embedding.weight"].grad = reference.mean(number, batch)["embedding.weight"]
            stepper.step()
    assert_same_weights(model, dense, 1e-8)
