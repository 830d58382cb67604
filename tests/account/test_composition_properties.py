"""What holds for every history: more is never cheaper, and order is nothing."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowkey.account import Event, compose, epsilon, renyi_epsilon

RATES = st.sampled_from([0.003, 0.02, 0.1, 0.5, 1.0])
NOISES = st.floats(0.6, 8.0)
STEPS = st.integers(1, 60)
ENTRY = st.tuples(RATES, NOISES, STEPS)
SLACK = 1 + 2e-3  # two grids may round one loss differently by this much


@settings(max_examples=12)
@given(ENTRY, st.integers(1, 60))
def test_more_steps_never_cost_less(entry: tuple[float, float, int], more: int) -> None:
    rate, noise, steps = entry
    assert epsilon([(rate, noise, steps + more)], 1e-6) * SLACK >= epsilon([entry], 1e-6)


@settings(max_examples=12)
@given(ENTRY, st.floats(1.01, 2.0))
def test_more_noise_never_costs_more(entry: tuple[float, float, int], factor: float) -> None:
    rate, noise, steps = entry
    assert epsilon([(rate, noise * factor, steps)], 1e-6) <= epsilon([entry], 1e-6) * SLACK


@settings(max_examples=12)
@given(ENTRY, st.floats(1.01, 2.0))
def test_a_larger_sampling_rate_never_costs_less(entry: tuple[float, float, int], factor: float) -> None:
    rate, noise, steps = entry
    assert epsilon([(min(1.0, rate * factor), noise, steps)], 1e-6) * SLACK >= epsilon([entry], 1e-6)


@settings(max_examples=8)
@given(st.lists(ENTRY, min_size=2, max_size=3), st.randoms(use_true_random=False))
def test_order_and_splitting_never_matter(history: list[tuple[float, float, int]], shuffle: random.Random) -> None:
    pieces = [(rate, noise, 1) for rate, noise, steps in history for _ in range(steps)]
    shuffle.shuffle(pieces)
    assert epsilon(pieces, 1e-6) == pytest.approx(epsilon(history, 1e-6), rel=1e-9)


@settings(max_examples=12)
@given(st.lists(ENTRY, min_size=1, max_size=2), st.sampled_from([1e-4, 1e-6, 1e-9]))
def test_the_bound_is_never_above_either_accountant(history: list[tuple[float, float, int]], delta: float) -> None:
    events = [Event(sampling_rate=rate, noise_multiplier=noise, num_steps=steps) for rate, noise, steps in history]
    assert compose(events, delta).epsilon <= renyi_epsilon(events, delta)
