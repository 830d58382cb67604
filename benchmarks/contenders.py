"""Who takes the step. Each contender turns a built workload into a function that takes one whole training step."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from workloads import Materials

Step = Callable[[], None]

LEARNING_RATE = 1e-6
NOISE_MULTIPLIER = 1.0
CLIP_NORM = 1.0
RANK = 16
CARRIERS = 8


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A way to take a step.

    Fields:
        name: How the command line calls it.
        title: How tables call it.
        modules: Imported before memory is called idle, so that a library's own code does not count as a step's memory.
        start: Attaches to the model and returns the step.
    """

    name: str
    title: str
    modules: tuple[str, ...]
    start: Callable[[Materials], Step]

    def load(self) -> None:
        """Import what `start` needs."""
        for module in self.modules:
            importlib.import_module(module)


def _ordinary(materials: Materials, *, fused: bool) -> Step:
    trained = [parameter for parameter in materials.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=fused, foreach=not fused)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(materials.logits(), materials.labels).backward()
        optimizer.step()

    return step


def _floor(materials: Materials) -> Step:
    """The forward pass and the gradient of every activation, and nothing for any weight."""
    materials.model.requires_grad_(False)
    materials.first.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_())

    def step() -> None:
        F.cross_entropy(materials.logits(), materials.labels).backward()

    return step


def _forward_twice(materials: Materials) -> Step:
    """Two forward passes without gradients: what a method without a backward pass cannot go below."""

    @torch.no_grad()
    def step() -> None:
        for _ in range(2):
            F.cross_entropy(materials.logits(), materials.labels)

    return step


def _dpzero(materials: Materials) -> Step:
    import lowkey as lk

    # Losses alone show no coupling, so the first step of a run checks gradients once; here the steps after it are of interest.
    execution = lk.Execution(check_isolation=lk.CheckIsolation.NEVER)
    sgd = functools.partial(torch.optim.SGD, lr=LEARNING_RATE)
    private = lk.privatize(materials.model, sgd, method=lk.DPZero(), plan=_plan(materials), clip_norm=CLIP_NORM, execution=execution)

    def step() -> None:
        private.backward(lambda: F.cross_entropy(materials.logits(), materials.labels, reduction="none"))
        private.step()

    return step


def _plan(materials: Materials) -> Any:
    import lowkey as lk

    examples = len(materials.labels)
    return lk.Plan(
        noise_multiplier=NOISE_MULTIPLIER, delta=1e-5, num_examples=100 * examples, expected_batch_size=examples, num_steps=10_000
    )


def _private(materials: Materials, method: Callable[[], Any]) -> Step:
    import lowkey as lk

    optimizer = functools.partial(torch.optim.AdamW, lr=LEARNING_RATE, fused=True)
    private = lk.privatize(materials.model, optimizer, method=method(), plan=_plan(materials), clip_norm=CLIP_NORM)

    def step() -> None:
        private.backward(F.cross_entropy(materials.logits(), materials.labels, reduction="none"))
        private.step()

    return step


def _grape() -> Any:
    import lowkey as lk

    return lk.Grape(rank=RANK)


def _dpsgd() -> Any:
    import lowkey as lk

    return lk.DPSGD()


def _rgp() -> Any:
    import lowkey as lk

    return lk.RGP(rank=CARRIERS)


def _lora() -> Any:
    import lowkey as lk

    return lk.LoRA(rank=RANK)


def _non_private() -> Any:
    import lowkey as lk

    return lk.nonprivate.NonPrivate()


def _opacus(materials: Materials, *, mode: str) -> Step:
    from opacus import PrivacyEngine

    trained = [parameter for parameter in materials.model.parameters() if parameter.requires_grad]
    # The batch below is handed over directly; the loader only tells Opacus the expected batch size and the sampling rate.
    rows = torch.utils.data.TensorDataset(torch.zeros(100 * len(materials.labels), 1))
    made = PrivacyEngine().make_private(
        module=materials.model,
        optimizer=torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True),
        data_loader=torch.utils.data.DataLoader(rows, batch_size=len(materials.labels)),
        criterion=torch.nn.CrossEntropyLoss(),
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=CLIP_NORM,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    model, optimizer = made[:2]
    criterion = made[2] if mode == "ghost" else F.cross_entropy

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        criterion(materials.logits(model), materials.labels).backward()
        optimizer.step()

    return step


def _lowkey(name: str, title: str, method: Callable[[], Any]) -> Contender:
    return Contender(name=name, title=f"lowkey, {title}", modules=("lowkey",), start=functools.partial(_private, method=method))


CONTENDERS = {
    contender.name: contender
    for contender in [
        Contender(name="fused", title="ordinary training, AdamW (fused)", modules=(), start=functools.partial(_ordinary, fused=True)),
        Contender(name="foreach", title="ordinary training, AdamW (foreach)", modules=(), start=functools.partial(_ordinary, fused=False)),
        Contender(name="floor", title="forward and input gradients alone", modules=(), start=_floor),
        _lowkey("grape", f"Grape(rank={RANK})", _grape),
        _lowkey("dpsgd", "DPSGD()", _dpsgd),
        _lowkey("rgp", f"RGP(rank={CARRIERS})", _rgp),
        _lowkey("lora", f"LoRA(rank={RANK})", _lora),
        Contender(name="forward-twice", title="two forward passes alone", modules=(), start=_forward_twice),
        Contender(name="dpzero", title="lowkey, DPZero()", modules=("lowkey",), start=_dpzero),
        _lowkey("nonprivate", "NonPrivate(), no guarantee", _non_private),
        Contender(name="opacus-hooks", title="Opacus, hooks", modules=("opacus",), start=functools.partial(_opacus, mode="hooks")),
        Contender(name="opacus-ghost", title="Opacus, ghost clipping", modules=("opacus",), start=functools.partial(_opacus, mode="ghost")),
    ]
}
REFERENCES = ("fused", "foreach")
