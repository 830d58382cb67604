"""Plans for the sampling tests."""

from __future__ import annotations

from lowkey.account import Plan, Poisson, Sampling


def a_plan(*, num_examples: int = 20, expected_batch_size: int = 5, num_steps: int = 8, sampling: Sampling | None = None) -> Plan:
    """A small plan; its noise and delta decide nothing about who takes part."""
    return Plan(
        noise_multiplier=1.0,
        delta=1e-5,
        num_examples=num_examples,
        expected_batch_size=expected_batch_size,
        num_steps=num_steps,
        sampling=sampling or Poisson(),
    )
