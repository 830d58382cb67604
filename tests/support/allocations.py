"""Which tensors a private step makes, seen by a dispatch mode, on one weight whose gradient is larger than all else of a small batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lowkey as lk

EXAMPLES, POSITIONS = 4, 3
PLAN = lk.Plan(noise_multiplier=1.0, delta=1e-3, num_examples=100, expected_batch_size=5, num_steps=20)


class Allocations(TorchDispatchMode):
    """Notes the shape of every new tensor, in the backward pass as well; views and results in place are not new."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {_address(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        self.shapes += [tuple(value.shape) for value in tree_leaves(found) if isinstance(value, Tensor) and _address(value) not in given]
        return found

    def at_least(self, numel: int) -> list[tuple[int, ...]]:
        return [shape for shape in self.shapes if math.prod(shape) >= numel]


def _address(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


@dataclass(frozen=True)
class Subject:
    """One wide weight, whose gradient holds more numbers than everything else of a small batch."""

    model: Callable[[], nn.Module]
    inputs: Tensor

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for parameter in self.model().parameters())


def _numbers(*shape: int) -> Tensor:
    return torch.randn(EXAMPLES, *shape, generator=torch.Generator().manual_seed(0))


LINEAR = Subject(lambda: nn.Linear(60, 52, bias=False), _numbers(POSITIONS, 60))
CONVOLUTION = Subject(lambda: nn.Conv2d(12, 40, 3, padding=1, bias=False), _numbers(12, 3, 3))
EMBEDDING = Subject(lambda: nn.Embedding(200, 30), torch.randint(0, 200, (EXAMPLES, POSITIONS), generator=torch.Generator().manual_seed(0)))


def losses(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(inputs).square().flatten(1).sum(1)


def watched(method: Any, subject: Subject, *, with_step: bool) -> Allocations:
    """Take three steps, the checks of the first one included, and note what the private half makes, or all of it."""
    torch.manual_seed(0)
    model = subject.model()
    seen = Allocations()
    adam = functools.partial(torch.optim.AdamW, lr=0.1)
    with lk.privatize(model, adam, method=method, plan=PLAN, clip_norm=1.0, seed=0, noise=lk.SeededNoise(0)) as private:
        for _ in range(3):
            with seen:
                private.backward(lambda: losses(model, subject.inputs))
                if with_step:
                    private.step()
            if not with_step:
                private.step()
    return seen
