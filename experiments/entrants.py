"""The methods that are compared, and the four settings that each may choose from.

The budget is the same for all: four settings, each tried once.
Adam has the task's four learning rates, ten times larger for a head alone.
A method whose paper steps with SGD has two of those and two of SGD's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tasks import Task

import lowkey as lk
from lowkey.methods import Method

OptimizerFactory = Callable[..., torch.optim.Optimizer]
SGD_STEPS = (0.1, 0.3)
"""SGD's learning rate times the clip norm: how far a clipped gradient moves the weights at once, before momentum."""
MOMENTUM = 0.9
LENGTHS = (0.1, 0.3, 1.0, 3.0)
"""The longest step of a zeroth-order method, as a distance between weights."""


@dataclass(frozen=True)
class Setting:
    """An optimizer and its learning rate."""

    optimizer: str
    rate: float

    def __str__(self) -> str:
        return f"{self.optimizer}, {self.rate:.3g}"

    @property
    def factory(self) -> OptimizerFactory:
        """What `privatize` calls with the tensors to step."""
        if self.optimizer == "Adam":
            return functools.partial(torch.optim.Adam, lr=self.rate)
        momentum = MOMENTUM if self.optimizer == "SGD with momentum" else 0.0
        return functools.partial(torch.optim.SGD, lr=self.rate, momentum=momentum)


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """A method with its options.

    Fields:
        name: What the tables call it.
        page: Its page in docs/methods.
        needs: The class in `lowkey` that makes it.
        make: Makes the method for a task.
        settings: What it may choose from.
        has_guarantee: Whether its runs are private.
        uses_public: Whether it sees the public examples.
    """

    name: str
    page: str
    needs: str
    make: Callable[[Task], Method]
    settings: Callable[[Task], tuple[Setting, ...]]
    has_guarantee: bool = True
    uses_public: bool = False

    @property
    def is_there(self) -> bool:
        """Whether this version of lowkey has the method."""
        found: object = lk
        for part in self.needs.split("."):
            found = getattr(found, part, None)
        return found is not None


def adam(task: Task) -> tuple[Setting, ...]:
    """Return Adam with each of the task's learning rates."""
    return tuple(Setting("Adam", rate) for rate in task.learning_rates)


def adam_for_a_head(task: Task) -> tuple[Setting, ...]:
    """Return Adam with ten times the task's rates, because a head alone has further to go, and nothing behind it to upset."""
    return tuple(Setting("Adam", 10.0 * rate) for rate in task.learning_rates)


def adam_or_sgd(task: Task) -> tuple[Setting, ...]:
    """Return Adam with the two middle rates, and SGD with momentum with two of its own."""
    return (*adam(task)[1:3], *(Setting("SGD with momentum", step / task.clip_norm) for step in SGD_STEPS))


def zeroth_order(task: Task) -> tuple[Setting, ...]:
    """Return plain SGD with rates at which a clipped step has the same length for any model."""
    return tuple(Setting("SGD", length / (task.clip_norm * math.sqrt(task.num_trained))) for length in LENGTHS)


def _private() -> list[Entrant]:
    return [
        Entrant(name="DPSGD", page="dpsgd", needs="DPSGD", make=lambda task: lk.DPSGD(), settings=adam),
        Entrant(
            name="Grape",
            page="grape",
            needs="Grape",
            make=lambda task: lk.Grape(rank=task.rank, refresh_every=task.refresh_every),
            settings=adam,
        ),
        Entrant(name="RGP", page="rgp", needs="RGP", make=lambda task: lk.RGP(rank=task.rank), settings=adam),
        Entrant(
            name="RGP, random basis",
            page="rgp",
            needs="RGP",
            make=lambda task: lk.RGP(rank=task.rank, basis="random"),
            settings=adam,
        ),
        Entrant(
            name="RGP, left carrier",
            page="rgp",
            needs="RGP",
            make=lambda task: lk.RGP(rank=task.rank, carriers="left"),
            settings=adam,
        ),
        Entrant(
            name="PDPSGD",
            page="pdpsgd",
            needs="PDPSGD",
            make=lambda task: lk.PDPSGD(public=task.public_examples, rank=task.subspace_rank, refresh_every=task.refresh_every),
            settings=adam_or_sgd,
            uses_public=True,
        ),
        Entrant(
            name="PDPSGD, sketch first",
            page="pdpsgd",
            needs="PDPSGD",
            make=lambda task: lk.PDPSGD(
                public=task.public_examples, rank=task.subspace_rank, refresh_every=task.refresh_every, sketch_first=True
            ),
            settings=adam_or_sgd,
            uses_public=True,
        ),
        Entrant(
            name="RPDPSGD",
            page="rpdpsgd",
            needs="RPDPSGD",
            make=lambda task: lk.RPDPSGD(rank=task.subspace_rank),
            settings=adam_or_sgd,
        ),
        Entrant(
            name="GEP",
            page="gep",
            needs="GEP",
            make=lambda task: lk.GEP(public=task.public_examples, rank=task.subspace_rank, refresh_every=task.refresh_every),
            settings=adam_or_sgd,
            uses_public=True,
        ),
        Entrant(name="Denoise", page="denoise", needs="Denoise", make=lambda task: lk.Denoise(), settings=adam),
        Entrant(
            name="Denoise, momentum",
            page="denoise",
            needs="Denoise",
            make=lambda task: lk.Denoise(target="momentum"),
            settings=adam,
        ),
        Entrant(
            name="NaiveGaLore",
            page="naivegalore",
            needs="NaiveGaLore",
            make=lambda task: lk.NaiveGaLore(rank=task.rank, refresh_every=task.refresh_every),
            settings=adam,
        ),
        Entrant(name="PowerSGD", page="powersgd", needs="PowerSGD", make=lambda task: lk.PowerSGD(rank=task.rank), settings=adam),
        Entrant(name="LoRA", page="lora", needs="LoRA", make=lambda task: lk.LoRA(rank=task.rank), settings=adam),
        Entrant(
            name="LoRA, frozen A",
            page="lora",
            needs="LoRA",
            make=lambda task: lk.LoRA(rank=task.rank, freeze_a=True),
            settings=adam,
        ),
        Entrant(name="LinearProbe", page="linearprobe", needs="LinearProbe", make=lambda task: lk.LinearProbe(), settings=adam_for_a_head),
        Entrant(name="DPZero", page="dpzero", needs="DPZero", make=lambda task: lk.DPZero(), settings=zeroth_order),
    ]


def _without_guarantee() -> list[Entrant]:
    plain = lk.nonprivate
    return [
        Entrant(
            name="NonPrivate",
            page="nonprivate",
            needs="nonprivate.NonPrivate",
            make=lambda task: plain.NonPrivate(),
            settings=adam,
            has_guarantee=False,
        ),
        Entrant(
            name="GaLore",
            page="galore",
            needs="nonprivate.GaLore",
            make=lambda task: plain.GaLore(rank=task.rank, refresh_every=task.refresh_every),
            settings=adam,
            has_guarantee=False,
        ),
        Entrant(
            name="LinearProbe, not private",
            page="linearprobe",
            needs="LinearProbe",
            make=lambda task: plain.NonPrivate(method=lk.LinearProbe()),
            settings=adam_for_a_head,
            has_guarantee=False,
        ),
    ]


ENTRANTS = {entrant.name: entrant for entrant in (*_private(), *_without_guarantee())}
REFERENCE = "DPSGD"
