"""Small models, and runs of them that an audit can build again and again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import lowkey as lk

ADAM = functools.partial(torch.optim.Adam, lr=0.01)
Batch = Mapping[str, Tensor]
MakePrivate = Callable[[Any], tuple[lk.Private, Callable[[Batch], Tensor]]]

PLAN = lk.Plan(noise_multiplier=1.0, delta=1e-3, num_examples=100, expected_batch_size=10, num_steps=100)


class Mlp(nn.Module):
    """Linear layers and a norm behind a frozen layer and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.register_buffer("shift", torch.ones(12))
        self.body = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.LayerNorm(24), nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(self.frozen(inputs) + self.shift)


class Layer(nn.Module):
    """One matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(12, 9, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs)


class Twice(nn.Module):
    """One weight in two places that pull the same way."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 40)
        self.head = nn.Linear(40, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(inputs)) + torch.tanh(self.layer(inputs + 0.1)))


def batch_of(num_examples: int = 5, *, dtype: torch.dtype = torch.float32) -> Batch:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(num_examples, 12, generator=generator, dtype=dtype)
    return {"x": inputs, "y": torch.randint(0, 4, (num_examples,), generator=generator)}


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def maker(
    method: Any,
    *,
    model: Callable[[], nn.Module] = Mlp,
    loss: Callable[[nn.Module, Any], Tensor] = cross_entropy,
    dtype: torch.dtype = torch.float32,
    optimizer: Callable[..., torch.optim.Optimizer] = ADAM,
    plan: lk.Plan = PLAN,
    **options: Any,
) -> MakePrivate:
    """Return a function that builds the same run for every noise source."""

    def make_private(noise: Any) -> tuple[lk.Private, Callable[[Batch], Tensor]]:
        torch.manual_seed(0)
        built = model().to(dtype)
        private = lk.privatize(built, optimizer, method=method, plan=plan, clip_norm=0.7, noise=noise, seed=0, **options)
        return private, functools.partial(loss, built)

    return make_private
