"""One run: train with one setting, measure on one part of the data, and keep what the tables need."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import torch
from entrants import ENTRANTS, Entrant, Setting
from tasks import Task, accuracy, load_task, losses
from torch import nn

import lowkey as lk


class Phase(StrEnum):
    """What a run is for."""

    TUNING = "tuning"
    """Chooses a setting, on the validation examples."""
    FINAL = "final"
    """Is reported, on the test examples."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What to run.

    Fields:
        task: Name of the task.
        phase: What the run is for.
        entrant: Name of the method.
        setting: The optimizer and its rate, as `str(Setting)`.
        epsilon: The budget; infinite for a method without a guarantee.
        seed: Draws the head, the batches, the bases and the noise.
    """

    task: str
    phase: Phase
    entrant: str
    setting: str
    epsilon: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run gave.

    Fields:
        accuracy: On the validation examples while tuning, on the test examples after that.
        seconds: Processor time of training, on one thread.
        released: How many numbers a step releases.
        noise_multiplier: The plan's.
        protocol: What all methods of the task had in common.
    """

    accuracy: float
    seconds: float
    released: int
    noise_multiplier: float
    protocol: str


PLANNED_EPSILON = 8.0
"""At which settings are chosen, and whose batches a method without a guarantee takes."""


def protocol(task: Task) -> str:
    """Name what all methods of a task have in common: results are compared only under one name."""
    return (
        f"{task.num_trained:,} weights, {task.num_steps} steps of {task.batch_size} of {len(task.train):,}, clip norm {task.clip_norm:g}, "
        f"rank {task.rank} of a matrix and {task.subspace_rank} of the whole, refreshed every {task.refresh_every} steps, "
        f"{len(task.public)} public examples"
    )


def run(trial: Trial) -> Outcome:
    """Train and measure. Everything is drawn from the seed, so that a run can be repeated; real training leaves seeds out."""
    task, entrant = _task(trial.task), ENTRANTS[trial.entrant]
    plan = _plan(trial.task, trial.epsilon if math.isfinite(trial.epsilon) else PLANNED_EPSILON)
    model = task.build(trial.seed)
    start = time.process_time()
    released = train(task, model, entrant, _setting(task, entrant, trial.setting), plan, trial.seed)
    seconds = time.process_time() - start
    measured = task.validation if trial.phase is Phase.TUNING else task.test
    return Outcome(
        accuracy=accuracy(model, measured),
        seconds=round(seconds, 2),
        released=released,
        noise_multiplier=plan.noise_multiplier if entrant.has_guarantee else 0.0,
        protocol=protocol(task),
    )


def train(task: Task, model: nn.Module, entrant: Entrant, setting: Setting, plan: lk.Plan, seed: int) -> int:
    """Train `model` in place, and return how many numbers a step released."""
    with lk.privatize(
        model,
        setting.factory,
        method=entrant.make(task),
        plan=plan,
        clip_norm=task.clip_norm,
        noise=lk.SeededNoise(seed),
        seed=seed,
    ) as private:
        for batch in lk.poisson_batches(task.train, plan, seed=seed):
            for some in lk.split(batch, task.microbatch):
                private.backward(functools.partial(losses, model, some))
            private.step()
        blocks = {name: shape for sketch in private.sketches.values() for name, shape in sketch.blocks.items()}
    return sum(math.prod(shape) for shape in blocks.values())


def to_line(trial: Trial, outcome: Outcome) -> dict[str, Any]:
    """Return a run as the results file holds it; JSON knows no infinity."""
    line = {**asdict(trial), "phase": trial.phase.value, **asdict(outcome)}
    return {**line, "epsilon": trial.epsilon if math.isfinite(trial.epsilon) else None}


def from_line(line: Mapping[str, Any]) -> tuple[Trial, Outcome]:
    """Read what `to_line` wrote."""
    fields = {**line, "phase": Phase(line["phase"]), "epsilon": math.inf if line["epsilon"] is None else line["epsilon"]}
    trial = Trial(**{name: fields[name] for name in Trial.__dataclass_fields__})
    return trial, Outcome(**{name: fields[name] for name in Outcome.__dataclass_fields__})


def prepare_worker() -> None:
    """Let a worker compute on one core, and round numbers too small to matter to zero."""
    torch.set_num_threads(1)
    # A rate that is too large saturates the attention, whose gradients become so small that a processor takes six times as long over them.
    torch.set_flush_denormal(True)


@functools.cache
def _task(name: str) -> Task:
    return load_task(name)


@functools.cache
def _plan(task: str, epsilon: float) -> lk.Plan:
    return _task(task).plan(epsilon)


def _setting(task: Task, entrant: Entrant, name: str) -> Setting:
    return next(setting for setting in entrant.settings(task) if str(setting) == name)
