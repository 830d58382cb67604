"""Private steps from their formula: dense per-example gradients of a loop, one joint norm, the mean by the expected size. No noise."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from audited import Mlp, Twice, batch_of, cross_entropy
from per_example import looped
from torch import Tensor, nn

import lowkey as lk

Gradients = dict[str, Tensor]
Vectors = Mapping[str, Tensor]
"""Per-example coordinates by block, `(B, ...)`."""

NO_NOISE = lk.Plan(noise_multiplier=0.0, delta=1e-3, num_examples=100, expected_batch_size=5, num_steps=20)
NOISE = lk.Plan(noise_multiplier=1.0, delta=1e-3, num_examples=100, expected_batch_size=5, num_steps=20)

OPTIMIZERS = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adam": functools.partial(torch.optim.Adam, lr=0.01, weight_decay=0.1),
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
}


class ConvNet(nn.Module):
    """Convolutions with and without a stride, a norm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.second = nn.Conv2d(6, 5, 3, stride=2, bias=False)
        self.head = nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.first(inputs)))
        return self.head(torch.tanh(self.second(hidden)).mean((2, 3)))


class Conv1D(nn.Module):
    """A linear layer whose weight is stored input-first, known by its name as Hugging Face's is."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5), nn.Parameter(torch.zeros(outputs))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.addmm(self.bias, inputs.reshape(-1, inputs.shape[-1]), self.weight).view(*inputs.shape[:-1], -1)


class Turned(nn.Module):
    """Input-first layers over several positions, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = Conv1D(6, 14), Conv1D(14, 8), nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.down(torch.tanh(self.up(inputs))).tanh().mean(1))


def _data(*shape: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(8)
    return {"x": torch.randn(5, *shape, generator=generator, dtype=torch.float64), "y": torch.tensor([0, 1, 2, 0, 1])}


SUBJECTS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "MLP": (Mlp, batch_of(dtype=torch.float64)),
    "used twice": (Twice, batch_of(dtype=torch.float64)),
    "convolutions": (ConvNet, _data(2, 6, 6)),
    "input-first": (Turned, _data(7, 6)),
}


def twins(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Build a model twice, in float64 and with the same weights."""
    torch.manual_seed(0)
    first, second = build().double(), build().double()
    second.load_state_dict(first.state_dict())
    return first, second


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def dense_gradients(model: nn.Module, batch: Any) -> Gradients:
    return looped(model, cross_entropy, batch)


def clipped_mean(vectors: Vectors, clip_norm: float, size: int) -> Gradients:
    """Equation (R) without its noise: every block of an example is scaled by one factor."""
    squares = torch.stack([block.flatten(1).square().sum(1) for block in vectors.values()]).sum(0)
    factors = torch.ones_like(squares) if math.isinf(clip_norm) else (clip_norm / squares.sqrt()).clamp_max(1.0)
    return {name: torch.einsum("b...,b->...", block, factors) / size for name, block in vectors.items()}


def take(private: lk.Private, model: nn.Module, batch: Any, steps: int = 1) -> None:
    for _ in range(steps):
        private.backward(cross_entropy(model, batch))
        private.step()


def assert_same_weights(found: nn.Module, expected: nn.Module, tolerance: float = 1e-8) -> None:
    for (name, mine), theirs in zip(found.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * 1e-1, msg=lambda text, name=name: f"{name}: {text}")
