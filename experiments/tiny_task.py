"""A task of a second, for the tests of the comparison itself: nothing is learned from it."""

from __future__ import annotations

import torch
from tasks import Task, majority, part
from torch import nn
from torch.utils.data import TensorDataset


def load() -> Task:
    """Return two clouds of points and a network of two layers."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 2, (400,), generator=generator)
    points = torch.randn(400, 12, generator=generator) + 2.0 * labels[:, None]
    examples = TensorDataset(points, labels)
    test = part(examples, 300, 400)
    return Task(
        name="tiny",
        title="Two clouds of points",
        train=part(examples, 0, 200),
        public=part(examples, 200, 230),
        validation=part(examples, 230, 300),
        test=test,
        build=build,
        num_steps=4,
        batch_size=40,
        clip_norm=0.5,
        microbatch=30,
        rank=3,
        subspace_rank=5,
        learning_rates=(3e-3, 1e-2, 3e-2, 1e-1),
        baselines=lambda: {"always the more frequent answer": majority(test.tensors[1])},
    )


def build(seed: int) -> nn.Module:
    """Return the network of a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
