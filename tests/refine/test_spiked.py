"""The closed forms agree with each other, with the paper's, and with matrices that follow the model."""

from __future__ import annotations

import math

import pytest
import torch
from dense_shrink import dense_shrink, frame
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowkey.refine import bulk_edge, observed_values, shrunk_values, signal_values

SHAPES = [(7, 7), (30, 400), (400, 30), (384, 384), (1024, 4096)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


@shapes
@given(strength=st.floats(1.01, 1e4), noise_std=st.sampled_from([1e-6, 0.3, 50.0]))
def test_a_signal_is_found_again_from_what_it_shows_as(shape: tuple[int, int], strength: float, noise_std: float) -> None:
    signal = torch.tensor([strength * noise_std * (shape[0] * shape[1]) ** 0.25], dtype=torch.float64)
    # Close to the edge the inverse has a steep slope: one part in 1e12 of the observed value is some in 1e10 of the signal.
    tolerance = 1e-12 * max(1.0, 0.1 / (strength - 1.0))
    torch.testing.assert_close(signal_values(observed_values(signal, shape, noise_std), shape, noise_std), signal, rtol=tolerance, atol=0.0)


@shapes
def test_the_closed_form_of_the_weight_is_the_papers_product(shape: tuple[int, int]) -> None:
    observed = bulk_edge(shape, 0.5) * torch.tensor([1.05, 1.5, 3.0, 100.0], dtype=torch.float64)
    signal, noise = signal_values(observed, shape, 0.5), 0.25
    rows, cols = shape
    gain = signal**4 - rows * cols * noise**2
    product = signal * (gain / (signal**4 + rows * signal**2 * noise)).sqrt() * (gain / (signal**4 + cols * signal**2 * noise)).sqrt()
    torch.testing.assert_close(shrunk_values(observed, shape, 0.5), product, rtol=1e-12, atol=0.0)


@shapes
def test_the_weight_rises_from_zero_at_the_edge_and_stays_below_the_signal(shape: tuple[int, int]) -> None:
    edge = bulk_edge(shape, 2.0)
    observed = edge * (1.0 + torch.logspace(-15, 4, 200, dtype=torch.float64))
    weights = shrunk_values(observed, shape, 2.0)
    assert bool((weights.diff() >= 0).all())
    assert bool((weights <= signal_values(observed, shape, 2.0)).all())
    # It starts as a root: an edge missed by one part in 1e15 is a weight of some 1e-8.
    assert float(weights[0]) < 1e-6 * edge
    assert bool((shrunk_values(edge * torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64), shape, 2.0) == 0).all())


@shapes
def test_without_noise_every_value_is_the_signal(shape: tuple[int, int]) -> None:
    values = torch.tensor([1e-9, 1.0, 7.0], dtype=torch.float64)
    for closed_form in (observed_values, signal_values, shrunk_values):
        torch.testing.assert_close(closed_form(values, shape, 0.0), values)


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_a_weak_signal_shows_as_the_edge(strength: float) -> None:
    signal = torch.tensor([strength * 6.0**0.5], dtype=torch.float64)
    torch.testing.assert_close(observed_values(signal, (4, 9), 1.0), torch.tensor([5.0], dtype=torch.float64))


# -- matrices that follow the model ------------------------------------------------------------------------------------

NUM_DRAWS, SHAPE, NOISE_STD, SIGNAL = 120, (120, 300), 0.3, 0.3 * 2.0 * (120 * 300) ** 0.25
"""A z-score below 6 is exceeded with probability 2e-9 by chance alone; limits are off by about one part in m at a finite size."""


def simulated() -> tuple[Tensor, Tensor]:
    """The largest observed value of each draw, and the weight of its singular vectors that is closest to the signal: `u^T X v`."""
    observed, weights = [], []
    for seed in range(NUM_DRAWS):
        generator = torch.Generator().manual_seed(seed)
        signal = SIGNAL * torch.outer(frame(SHAPE[0], 1, generator)[0], frame(SHAPE[1], 1, generator)[0])
        noisy = signal + NOISE_STD * torch.randn(SHAPE, generator=generator, dtype=torch.float64)
        left, values, right = torch.linalg.svd(noisy, full_matrices=False)
        observed.append(values[0])
        weights.append(left[:, 0] @ signal @ right[0])
    return torch.stack(observed), torch.stack(weights)


def agrees(draws: Tensor, expected: float) -> bool:
    error = 6.0 * float(draws.std()) / math.sqrt(NUM_DRAWS) + expected / min(SHAPE)
    return abs(float(draws.mean()) - expected) < error


def test_simulated_matrices_show_and_lose_what_the_formulas_say() -> None:
    observed, weights = simulated()
    shown = observed_values(torch.tensor([SIGNAL]), SHAPE, NOISE_STD)
    assert agrees(observed, float(shown))
    assert agrees(weights, float(shrunk_values(shown, SHAPE, NOISE_STD)))
    # Spoiled: noise 10 % higher, and one side of the matrix forgotten.
    assert not agrees(observed, float(observed_values(torch.tensor([SIGNAL]), SHAPE, 1.1 * NOISE_STD)))
    assert not agrees(weights, float(shrunk_values(shown, SHAPE, 1.1 * NOISE_STD)))
    assert not agrees(observed, float(observed_values(torch.tensor([SIGNAL]), (120, 1), NOISE_STD)))


def test_shrinking_comes_closer_to_the_signal_than_cutting_and_than_other_weights() -> None:
    generator = torch.Generator().manual_seed(0)
    signal = SIGNAL * torch.outer(frame(SHAPE[0], 1, generator)[0], frame(SHAPE[1], 1, generator)[0])
    noisy = signal + NOISE_STD * torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    shrunk = dense_shrink(noisy, NOISE_STD, 1.02, norm_correction=False)
    errors = {factor: float((factor * shrunk - signal).norm()) for factor in (0.85, 1.0, 1.15)}
    assert errors[1.0] < min(errors[0.85], errors[1.15], float((noisy - signal).norm()))
