"""The naive truth about per-example gradients, and what the capture says, side by side.

The loop runs the model on one example at a time with plain autograd; it shares no code with `lowkey.factors`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowkey.factors import Capture, Collector, Compression, Factor, Taps, Weight, select
from lowkey.sketch import Identity

Batch = Mapping[str, Tensor]
Losses = Callable[[Any, Batch], Tensor]
Gradients = dict[str, Tensor]


def looped(model: nn.Module, losses: Losses, batch: Batch) -> Gradients:
    """Each example's gradient by autograd on that example alone, `(B, *shape)` per trainable parameter."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    size = len(next(iter(batch.values())))
    rows: list[Sequence[Tensor | None]] = []
    for b in range(size):
        (loss,) = losses(model, {key: value[b : b + 1] for key, value in batch.items()})
        rows.append(torch.autograd.grad(loss, list(named.values()), allow_unused=True))
    return {
        name: torch.stack([torch.zeros_like(parameter) if row[i] is None else row[i].to_dense() for row in rows])
        for i, (name, parameter) in enumerate(named.items())
    }


class Watched:
    """A model whose per-example gradients are caught, without privacy around it."""

    def __init__(self, model: nn.Module, sketches: Mapping[str, Compression] | None = None) -> None:
        self.model = model
        self.parameters = select(model, None)
        sketches = sketches or {}
        weights = {
            name: Weight(name=name, shape=tuple(p.shape), compression=sketches.get(name, Identity(name, tuple(p.shape))))
            for name, p in self.parameters.items()
        }
        self.collector = Collector(weights, self.parameters)
        self.capture = Capture(self.collector, weights, self.parameters)
        frozen = {name: p for name, p in model.named_parameters() if name not in self.parameters}
        self.capture.set_constants({**dict(model.named_buffers()), **frozen})

    def output(self, *inputs: Tensor) -> Tensor:
        """Run a forward pass under the capture."""
        with self.capture.watching():
            return self.model(*inputs)

    def factors(self, losses: Losses, batch: Batch) -> dict[str, Factor]:
        taps = Taps(self.model, self.capture, self.parameters)
        try:
            each = losses(self.model, batch)
            self.collector.begin(len(each))
            torch.autograd.backward(each, torch.ones_like(each))
            factors = self.collector.finish()._blocks
        finally:
            taps.remove()
            self.collector.abandon()
            self.capture.forget()
        assert all(parameter.grad is None for parameter in self.parameters.values()), "a raw gradient escaped the capture"
        return dict(factors)


def caught(model: nn.Module, losses: Losses, batch: Batch) -> Gradients:
    """Each example's gradient as the capture finds it."""
    factors = Watched(model).factors(losses, batch)
    size = len(next(iter(batch.values())))
    return {
        name: factors[name].dense().detach() if name in factors else torch.zeros(size, *parameter.shape)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def distance(found: Gradients, expected: Gradients) -> float:
    """The largest difference, relative to the largest gradient of all."""
    scale = max(float(value.abs().max()) for value in expected.values())
    return max(float((found[name] - value).abs().max()) for name, value in expected.items()) / scale


def assert_caught(model: nn.Module, losses: Losses, batch: Batch, tolerance: float = 1e-9) -> None:
    """Demand that the capture and the loop agree on every example, every parameter and every output."""
    expected = looped(model, losses, batch)
    assert distance(caught(model, losses, batch), expected) < tolerance
    squares = {name: value.reshape(len(value), -1).square().sum(1) for name, value in expected.items()}
    for name, factor in Watched(model).factors(losses, batch).items():
        # The Gram norm adds a margin for rounding, so it is compared from both sides at the same tolerance.
        torch.testing.assert_close(
            factor.squared_norms().double(), squares[name].double(), rtol=tolerance, atol=tolerance * float(sum(squares.values()).max())
        )
