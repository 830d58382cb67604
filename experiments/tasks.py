"""What a comparison trains on: data in four parts, a model, and a plan, one and the same for every method."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lowkey as lk

_EVALUATION_BATCH = 500


@dataclass(frozen=True, kw_only=True)
class Task:
    """A data set, a model and the settings that all methods share.

    Each data set holds the model's inputs, and the labels last.

    Fields:
        name: What the command line and the results call it.
        title: What the pages call it.
        train: The examples that are private in the comparison.
        public: The examples that methods with public data see; no other method trains on them.
        validation: What learning rates are chosen on.
        test: What is reported.
        build: Makes the model of a seed.
        num_steps: Releases of a run.
        batch_size: Expected examples of a step.
        clip_norm: The limit on an example.
        microbatch: How many examples fit one backward pass; changes nothing but speed.
        rank: Kept dimensions of each matrix, for every method that has them.
        subspace_rank: Kept dimensions of the whole gradient, for every method that has them.
        learning_rates: What Adam may choose from.
        baselines: Computes accuracies on the test examples that need no comparison.
    """

    name: str
    title: str
    train: TensorDataset
    public: TensorDataset
    validation: TensorDataset
    test: TensorDataset
    build: Callable[[int], nn.Module]
    num_steps: int
    batch_size: int
    clip_norm: float
    microbatch: int
    rank: int
    subspace_rank: int
    learning_rates: tuple[float, float, float, float]
    baselines: Callable[[], Mapping[str, float]]

    @property
    def refresh_every(self) -> int:
        """How often methods renew a basis, where they do."""
        return max(1, self.num_steps // 4)

    @property
    def num_trained(self) -> int:
        """How many weights are trained."""
        return sum(parameter.numel() for parameter in self.build(0).parameters() if parameter.requires_grad)

    @property
    def public_examples(self) -> lk.Public:
        """The public examples in the form that methods take."""
        columns = {str(index): tensor for index, tensor in enumerate(self.public.tensors)}
        return lk.Public(examples=columns, loss=lambda model, examples: losses(model, list(examples.values())))

    def plan(self, epsilon: float) -> lk.Plan:
        """Return the plan that every method follows."""
        return lk.calibrate(
            epsilon=epsilon, delta=DELTA, num_examples=len(self.train), expected_batch_size=self.batch_size, num_steps=self.num_steps
        )


DELTA = 1e-5


def load_task(name: str) -> Task:
    """Return a task by its name; the first time, its data are fetched or computed, and kept in a folder that git ignores."""
    task: Task = importlib.import_module(TASKS[name]).load()
    return task


TASKS = {"text": "text_task", "image": "image_task", "tiny": "tiny_task"}


def losses(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Return one cross-entropy per example."""
    *inputs, labels = batch
    return F.cross_entropy(model(*inputs), labels, reduction="none")


@torch.no_grad()
def accuracy(model: nn.Module, examples: TensorDataset) -> float:
    """Return the share of examples that the model gets right."""
    num_right = 0
    for batch in zip(*(tensor.split(_EVALUATION_BATCH) for tensor in examples.tensors), strict=True):
        *inputs, labels = batch
        num_right += int((model(*inputs).argmax(1) == labels).sum())
    return num_right / len(examples)


def majority(labels: Tensor) -> float:
    """Return the accuracy of always giving the most frequent answer."""
    return float(torch.bincount(labels).max()) / len(labels)


def part(examples: TensorDataset, start: int, stop: int) -> TensorDataset:
    """Return some consecutive examples."""
    return TensorDataset(*(tensor[start:stop] for tensor in examples.tensors))
