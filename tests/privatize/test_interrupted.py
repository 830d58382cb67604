"""Does a backward pass or a step that fails on its way leave nothing behind?"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from unseen import Scaled

import lowkey as lk

EXAMPLES, FEATURES = 6, 4


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise MemoryError("no room for the gradient")


class Model(nn.Module):
    """A layer, a failure in the backward pass if wanted, and a scale whose gradient arrives before it."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__()
        self.layer, self.fails = nn.Linear(FEATURES, FEATURES), fails
        self.scale = nn.Parameter(torch.ones(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        return Scaled.apply(Failing.apply(hidden), self.scale) if self.fails else hidden * self.scale


def attach(model: nn.Module, optimizer: Any = torch.optim.SGD) -> lk.Private:
    plan = lk.Plan(noise_multiplier=0.0, delta=1e-5, num_examples=100, expected_batch_size=10, num_steps=5)
    return lk.privatize(model, functools.partial(optimizer, lr=0.1), method=lk.DPSGD(), plan=plan, clip_norm=1.0)


def losses(model: nn.Module) -> Tensor:
    return model(torch.ones(EXAMPLES, FEATURES)).square().sum(1)


def test_a_backward_pass_that_fails_leaves_no_raw_gradient() -> None:
    model = Model(fails=True)
    with attach(model) as private:
        with pytest.raises(MemoryError):
            private.backward(losses(model))
        assert model.scale.grad is None


class Interrupted(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # reason: torch overloads it
        raise KeyboardInterrupt


def test_a_step_that_is_interrupted_is_charged_and_not_taken_for_a_raw_gradient() -> None:
    model = Model(fails=False)
    with attach(model, Interrupted) as private:
        private.backward(losses(model))
        with pytest.raises(KeyboardInterrupt):
            private.step()
        private.backward(losses(model))
        assert private.num_steps_left == 4
