"""The thing under audit: built anew for every run, from the same weights, with a noise source of the audit's choice."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from lowkey.account import Statement
from lowkey.account.ledger import History
from lowkey.boundary import Released
from lowkey.errors import ConfigError
from lowkey.privatize import Private
from lowkey.release import NoiseSource, SeededNoise
from lowkey.sample.microbatch import batch_size, map_columns

MakePrivate = Callable[..., Any]
Loss = Callable[..., Tensor]
Coordinates = dict[str, Tensor]

_MOST_EXAMPLES = 5
_USAGE = (
    "Pass a function that takes a noise source and returns (private, loss), as\n"
    "  def make_private(noise):\n"
    "      torch.manual_seed(0)\n"
    "      model = build_model()\n"
    "      private = lk.privatize(model, optimizer, method=method, plan=plan, clip_norm=1.0, noise=noise, seed=0)\n"
    "      return private, lambda batch: loss_per_example(model, batch)"
)


class Spoil(Protocol):
    """Turns the last example of a microbatch into the worst that there could be."""

    @property
    def label(self) -> str: ...

    def change_batch(self, batch: Any) -> Any: ...

    def change_losses(self, losses: Tensor) -> Tensor: ...

    def attached_to(self, model: nn.Module) -> contextlib.AbstractContextManager[object]: ...


@dataclass(frozen=True, kw_only=True)
class Part:
    """One microbatch: which examples, how their losses are scaled, and what happens to the last of them."""

    rows: tuple[int, ...]
    scale: float = 1.0
    spoil: Spoil | None = None


Step = Sequence[Part]
EMPTY: Step = ()


class Session:
    """One `Private` object under audit, and what can be seen of it from outside."""

    def __init__(self, private: Private, loss: Loss, batch: Any) -> None:
        self.private, self.model = private, private.model
        self._loss, self.batch = loss, batch
        self.releases: list[Released] = []
        private.on_release(self._note)

    def _note(self, released: Released) -> None:
        blocks = {name: block.detach().clone() for name, block in released.blocks.items()}
        copy = Released(blocks=blocks, noise_std=released.noise_std, l2_bound=released.l2_bound, step=released.step)
        self.releases.append(copy)

    def losses(self, part: Part) -> Tensor:
        """Run the model on a microbatch."""
        batch = pick(self.batch, part.rows)
        if part.spoil is None:
            return self._loss(batch) * part.scale
        with part.spoil.attached_to(self.model):
            return part.spoil.change_losses(self._loss(part.spoil.change_batch(batch)) * part.scale)

    def backward(self, part: Part) -> None:
        """Give a microbatch to the run."""
        self.private.backward(lambda: self.losses(part))

    def step(self, parts: Step = EMPTY) -> None:
        """Take one step over some microbatches."""
        for part in parts:
            self.backward(part)
        self.private.step()

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are being trained."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What one run showed.

    Fields:
        releases: One for each step, if the run is right.
        weights: The trained parameters at the end.
        moments: The optimizer's state at the end, flattened into a list.
        history: What the ledger had charged at the end.
    """

    releases: list[Released]
    weights: Coordinates
    moments: list[Tensor] = field(default_factory=list[Tensor])
    history: History = ()

    def release(self, number: int = 0) -> Coordinates:
        """Return the coordinates of one release; nothing if it was not made."""
        return dict(self.releases[number].blocks) if number < len(self.releases) else {}


class Subject:
    """Builds sessions and runs them.

    Fields:
        num_examples: How many examples of the batch the audit uses.
        claims: What the run states about itself before its first step.
        num_steps: How many steps its plan allows.
        sketches: The sketch of each parameter in its first step.
    """

    def __init__(self, make_private: MakePrivate, batch: Any, loss: Loss | None = None) -> None:
        self._make_private, self._loss = make_private, loss
        count = batch_size(batch)
        if count < 2:
            raise ConfigError(f"batch holds {count} examples. An audit compares a batch with and without one of them. Pass at least two.")
        self.num_examples = min(count, _MOST_EXAMPLES)
        self._batch = pick(batch, tuple(range(self.num_examples)))
        self._rests = False
        with self.session(SeededNoise(0)) as session:
            self.claims: Statement = session.private.statement()
            self.num_steps = session.private.num_steps_left
            self.sketches = session.private.sketches
            self._rests = not _is_repeatable(session, self.rows)

    @property
    def rows(self) -> tuple[int, ...]:
        """Every example."""
        return tuple(range(self.num_examples))

    @property
    def clip_norm(self) -> float:
        """The limit that is claimed; infinite without one."""
        return math.inf if self.claims.clip_norm is None else self.claims.clip_norm

    @property
    def unit(self) -> float:
        """What one example may move a release by."""
        return self.clip_norm / self.claims.expected_batch_size

    @property
    def is_resting(self) -> bool:
        """Whether the model draws random numbers of its own in training mode, so that it is audited in eval mode."""
        return self._rests

    @contextlib.contextmanager
    def session(self, noise: NoiseSource) -> Generator[Session]:
        """Build a run with `noise`, and put everything back afterwards."""
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(0)
            private, loss = self._build(noise)
            before = {name: value.detach().clone() for name, value in tensors_of(private.model).items()}
            modes = {module: module.training for module in private.model.modules()}
            if self._rests:
                private.model.eval()
            try:
                yield Session(private, loss, self._batch)
            finally:
                private.close()
                _restore(private.model, before, modes)

    def _build(self, noise: NoiseSource) -> tuple[Private, Loss]:
        made = _call(self._make_private, noise)
        private, loss = (
            cast("tuple[object, object]", made)
            if isinstance(made, tuple) and len(cast("tuple[object, ...]", made)) == 2
            else (made, self._loss)
        )
        if not isinstance(private, Private) or not callable(loss):
            raise ConfigError(
                f"make_private returned {type(made).__name__} and loss is {loss!r}. "
                f"An audit needs a Private object and a loss per example. {_USAGE}"
            )
        return private, _on_batch(cast("Loss", loss), private.model)

    def run(self, steps: Sequence[Step], noise: NoiseSource) -> Trace:
        """Run some steps and return what they showed."""
        with self.session(noise) as session:
            for step in steps:
                session.step(step)
            return trace(session)


def trace(session: Session) -> Trace:
    """Copy what a session shows."""
    state = session.private.optimizer.state_dict()["state"]
    moments = [value.detach().clone() for entry in state.values() for value in entry.values() if isinstance(value, Tensor)]
    weights = {name: parameter.detach().clone() for name, parameter in session.trained().items()}
    return Trace(releases=session.releases, weights=weights, moments=moments, history=session.private.history)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer, under a name of its own."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def pick(batch: Any, rows: Sequence[int]) -> Any:
    """Return the examples of a batch at `rows`, in that order."""
    chosen = list(rows)

    def choose(column: Any) -> object:
        return type(column)(column[row] for row in chosen) if isinstance(column, list | tuple) else column[chosen]

    return map_columns(batch, choose)


def _is_repeatable(session: Session, rows: tuple[int, ...]) -> bool:
    with torch.no_grad():
        first, second = (session.losses(Part(rows=rows)) for _ in range(2))
    return torch.equal(first, second)


def _restore(model: nn.Module, before: Coordinates, modes: dict[nn.Module, bool]) -> None:
    with torch.no_grad():
        for name, value in tensors_of(model).items():
            value.copy_(before[name])
    for module, mode in modes.items():
        module.training = mode


def _call(make_private: object, noise: NoiseSource) -> object:
    if not callable(make_private) or isinstance(make_private, Private):
        raise ConfigError(f"make_private={make_private!r} is not a function. An audit builds the run many times over. {_USAGE}")
    parameters = inspect.signature(make_private).parameters.values()
    if any(parameter.name == "noise" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return make_private(noise=noise)
    if not any(
        parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD, parameter.VAR_POSITIONAL) for parameter in parameters
    ):
        raise ConfigError(f"make_private takes no argument. An audit must choose the noise, to subtract it. {_USAGE}")
    return make_private(noise)


def _on_batch(loss: Loss, model: nn.Module) -> Loss:
    """Let `loss(batch)` and `loss(model, batch)` be called alike."""
    required = [parameter for parameter in inspect.signature(loss).parameters.values() if parameter.default is parameter.empty]
    positional = [parameter for parameter in required if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)]
    return (lambda batch: loss(model, batch)) if len(positional) == 2 else loss
