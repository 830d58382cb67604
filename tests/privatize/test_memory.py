"""The memory of a step is that of one microbatch, however many the batch is cut into."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lowkey as lk

MICROBATCH, POSITIONS, FEATURES = 8, 32, 64
PLAN = lk.Plan(noise_multiplier=1.0, delta=1e-5, num_examples=1000, expected_batch_size=64, num_steps=10)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, FEATURES))
        self.head = nn.Linear(FEATURES, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.body(inputs) + inputs).mean(1)


def peak_bytes(run: Callable[[], None]) -> int:
    """The most bytes that tensors hold at one time, beyond those that they held before, by the allocator's own account."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    held = most = 0
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


@pytest.mark.parametrize(
    "method", [lk.DPSGD(), lk.Grape(rank=8, refresh_every=1), lk.RGP(rank=8), lk.LoRA(rank=8), lk.Denoise()], ids=lambda m: type(m).__name__
)
def test_more_microbatches_take_no_more_memory(method: lk.DPSGD) -> None:
    model = Residual()
    adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
    with lk.privatize(model, adamw, method=method, plan=PLAN, clip_norm=1.0) as private:

        def step(num_examples: int, size: int) -> None:
            for part in lk.split(torch.randn(num_examples, POSITIONS, FEATURES), size):
                private.backward(model(part).square().sum(1))
            private.step()

        step(MICROBATCH, MICROBATCH)  # the optimizer makes its state, and examples are checked against each other
        two, sixteen, whole = (
            peak_bytes(functools.partial(step, count * MICROBATCH, size)) - count * MICROBATCH * POSITIONS * FEATURES * 4
            for count, size in ((2, MICROBATCH), (16, MICROBATCH), (16, 16 * MICROBATCH))
        )
    assert sixteen <= 1.02 * two
    # The measure tells a batch that is not cut.
    assert whole > 4 * sixteen
