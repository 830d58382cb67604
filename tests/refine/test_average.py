"""A moving average weighs releases as its formula says, and knows the noise that is left."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from lowkey.refine import MovingAverage


def releases(count: int, size: int = 5) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"a": torch.randn(size, 2, generator=generator, dtype=torch.float64)} for _ in range(count)]


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_the_mean_is_the_weighted_mean_of_all_releases(decay: float, count: int) -> None:
    average, taken = MovingAverage(decay), releases(count)
    for blocks in taken:
        average.add(blocks, 1.0)
    weights = [decay ** (count - 1 - index) for index in range(count)]
    expected = sum(weight * blocks["a"] for weight, blocks in zip(weights, taken, strict=True)) / sum(weights)
    torch.testing.assert_close(average.means()["a"], expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("count", [1, 2, 7, 400])
def test_the_noise_level_is_the_closed_form(decay: float, count: int) -> None:
    average = MovingAverage(decay)
    for _ in range(count):
        average.add({}, 0.3)
    power = decay**count
    assert average.noise_std == pytest.approx(0.3 * math.sqrt((1 - decay) / (1 + decay) * (1 + power) / (1 - power)), rel=1e-12)


def test_levels_that_differ_add_up_in_squares() -> None:
    average = MovingAverage(0.5)
    for noise_std in (1.0, 3.0):
        average.add({}, noise_std)
    # Weights 1/3 and 2/3.
    assert average.noise_std == pytest.approx(math.hypot(1.0, 6.0) / 3.0)


def test_pure_noise_has_the_level_that_is_stated() -> None:
    """A chi-squared test at six standard deviations, alpha 2e-9, which tells a level from one 2 % higher."""
    average, num = MovingAverage(0.8), 200_000
    generator = torch.Generator().manual_seed(0)
    for noise_std in (1.0, 1.0, 2.0, 0.5):
        average.add({"a": noise_std * torch.randn(num, generator=generator, dtype=torch.float64)}, noise_std)
    observed = float(average.means()["a"].square().mean())
    assert abs(observed / average.noise_std**2 - 1.0) < 6.0 * math.sqrt(2.0 / num)
    assert abs(observed / (1.02 * average.noise_std) ** 2 - 1.0) > 6.0 * math.sqrt(2.0 / num)


def test_what_is_added_may_be_reused() -> None:
    average, blocks = MovingAverage(0.5), releases(1)[0]
    expected = blocks["a"].clone()
    average.add(blocks, 1.0)
    blocks["a"].zero_()
    mean = average.means()["a"]
    torch.testing.assert_close(mean, expected)
    mean.zero_()
    torch.testing.assert_close(average.means()["a"], expected)


def test_it_goes_on_from_a_state_as_if_never_stopped() -> None:
    first, second, taken = MovingAverage(0.5), MovingAverage(0.5), releases(4)
    for blocks in taken[:2]:
        first.add(blocks, 2.0)
    state = copy.deepcopy(first.state_dict())
    second.load_state_dict(state)
    for average in (first, second):
        for blocks in taken[2:]:
            average.add(blocks, 1.0)
    assert torch.equal(first.means()["a"], second.means()["a"])
    assert first.noise_std == second.noise_std
    torch.testing.assert_close(state["sums"]["a"], 0.25 * taken[0]["a"] + 0.5 * taken[1]["a"])  # the state itself stays as it was
