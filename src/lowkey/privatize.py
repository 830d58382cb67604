"""Attach privacy to a model and an optimizer, and keep your own loop.

The whole sentence is said here once: `backward` is sample → factors → sketch → clip → sum, `step` is noise ║ refine → optimizer → decode.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from lowkey.account import Head, History, Ledger, Plan, Statement, open_ledger
from lowkey.account.header import check_same_run, header_from_json, header_to_json
from lowkey.boundary import Public, Released
from lowkey.checkpoint import check_checkpoint, identify
from lowkey.errors import ConfigError, PrivacyBoundaryError
from lowkey.execution import CheckIsolation, Execution
from lowkey.factors import Selection, describe, refuse_coupling, require_module, select
from lowkey.gradients import ClippedGradients, Losses
from lowkey.methods import Method
from lowkey.methods.method import Start
from lowkey.optim import GroupOptions, OptimizerFactory, Slots
from lowkey.release import NoiseSource, SystemNoise, release_gaussian
from lowkey.release.arithmetic import in_full_precision
from lowkey.sample import num_drawn, num_seeded
from lowkey.setting import Setting
from lowkey.sketch import Identity, Sketch


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What a step may tell: public values only.

    Fields:
        step: How many releases this run has made.
        noise_std: Standard deviation of the noise on each released coordinate.
        num_steps_left: How many the plan still allows.
    """

    step: int
    noise_std: float
    num_steps_left: int


def privatize(
    model: nn.Module,
    optimizer: OptimizerFactory,
    *,
    method: Method,
    plan: Plan,
    clip_norm: float,
    noise: NoiseSource | None = None,
    ledger: str | os.PathLike[str] | None = None,
    dataset: str = "unnamed",
    trainable: Selection = None,
    groups: GroupOptions | None = None,
    execution: Execution | None = None,
    seed: int | None = None,
) -> Private:
    """Attach privacy to `model`, which stays the module that it is.

    Args:
        model: Any module whose examples lie along the first axis and do not touch each other.
        optimizer: Called with the tensors to step, as `functools.partial(torch.optim.AdamW, lr=1e-3)`.
        method: How a step is taken, as `DPSGD()` or `Grape(rank=16)`.
        plan: How much noise, for how many steps, at which sampling rate.
        clip_norm: The L2 limit on one example's joint vector.
        noise: Where noise comes from; the operating system by default.
        ledger: A file that outlives a crash; without it the budget is counted in memory.
        dataset: The name under which the ledger adds up runs on the same records.
        trainable: Names, or a function of (name, parameter); by default whatever has `requires_grad`.
        groups: Optimizer options of a parameter by its name, as `lambda name: {"weight_decay": 0.0}`.
        execution: Speed and checks; never changes a release.
        seed: Names the random bases; public. Fresh by default.

    Returns:
        The object with `backward`, `step`, `epsilon` and `close`.

    Raises:
        ConfigError: An argument does not fit; nothing has been spent.
        UnsupportedLayerError: The model couples examples, or a layer has no known per-example gradient.

    Guarantee:
        After any number of steps the weights are `(private.epsilon, plan.delta)`-differentially private for adding or removing one example,
        given that batches are drawn as the plan says, for real arithmetic and ideal Gaussian noise.

    Example:
        >>> import functools, torch, lowkey as lk
        >>> plan = lk.Plan(noise_multiplier=1.0, delta=1e-3, num_examples=100, expected_batch_size=10, num_steps=5)
        >>> model = torch.nn.Linear(3, 2)
        >>> sgd = functools.partial(torch.optim.SGD, lr=0.1)
        >>> with lk.privatize(model, sgd, method=lk.DPSGD(), plan=plan, clip_norm=1.0) as private:
        ...     private.backward(model(torch.randn(4, 3)).square().sum(1))
        ...     private.step().num_steps_left
        4
    """
    return Private(
        model,
        optimizer,
        Setting(
            method=method,
            plan=plan,
            clip_norm=clip_norm,
            noise=noise or SystemNoise(),
            ledger=ledger,
            dataset=dataset,
            trainable=trainable,
            groups=groups,
            execution=execution or Execution(),
            seed=int.from_bytes(os.urandom(8), "little") if seed is None else seed,
        ),
    )


class Private:
    """A model under training with privacy.

    Life cycle: any number of `backward`, then one `step`; repeat up to `plan.num_steps` times; `close`.
    A step without a `backward` is an empty batch: noise alone.
    """

    def __init__(self, model: nn.Module, optimizer: OptimizerFactory, setting: Setting) -> None:
        require_module(model)
        refuse_coupling(model)
        self._setting = setting
        self._model = model
        self._parameters = select(model, setting.trainable)
        self._specs = describe(model, self._parameters)
        self._is_attached = False
        self._strategy = setting.method.start(self._start())
        self._sketches = self._strategy.sketching.sketches(1)
        # What a method gives no sketch is not trained.
        self._parameters = {name: parameter for name, parameter in self._parameters.items() if name in self._sketches}
        self._slots = Slots(self._parameters, self._sketches, self._strategy.space.subspaces(), optimizer, setting.groups)
        self._gradients = ClippedGradients(
            model,
            self._parameters,
            self._sketches,
            setting.bound,
            setting.execution,
            clip_groups=self._strategy.clip_groups,
            probe_scale=self._strategy.probe,
        )
        self._is_attached = True
        self._step = self._resumed_at = 0
        self._closed = False
        self._drawn: int | None = None  # how many batches the plan had handed out when the sum of this step began
        self._observers: list[Callable[[Released], None]] = []
        try:
            self._ledger: Ledger = open_ledger(setting.ledger, setting.header)
        except BaseException:
            self._gradients.detach()
            raise

    def backward(self, losses: Losses) -> None:
        """Take each example's gradient, clip it, and add it to this step's sum.

        Args:
            losses: One loss per example, shape `(B,)`, from a forward pass since the last step; or a function that runs the model
                and returns them, which a zeroth-order method needs, for it takes each loss twice.

        Raises:
            ShapeError: `losses` is not one loss per example.
            UnsupportedLayerError: A parameter was used where its per-example gradient cannot be known, or examples touch each other.
            PrivacyBoundaryError: A second batch was drawn for the plan since this step's first `backward`.

        Assumes:
            Each example has one loss between two steps, and no loss holds two examples: two losses of one example are added up first.
        """
        self._check_open()
        drawn = num_drawn(self._setting.plan)
        self._check_one_batch(drawn)
        self._gradients.add(losses)
        self._drawn = drawn

    # -- the public side -----------------------------------------------------------------------------------------------

    def step(self) -> StepReport:
        """Make this step's one release and let the optimizer follow it.

        Raises:
            BudgetError: The plan is used up; nothing was released.
            ConfigError: Some trainable parameter has never been reached by a backward pass.
        """
        self._check_open()
        self._gradients.check_reached()
        # PRIVACY: the release is charged, on disk, before any noise is drawn for it.
        number = self._ledger.intend()
        sensitive, self._drawn = self._gradients.take(), None
        plan = self._setting.plan
        released = release_gaussian(sensitive, self._setting.noise_multiplier, plan.expected_batch_size, self._setting.noise, number)
        for observer in self._observers:
            observer(released)
        with in_full_precision(self._gradients.device):
            refined = self._strategy.refining.refine(released)
            self._slots.follow(self._sketches, self._strategy.space.subspaces(), self._strategy.on_refresh)
            self._slots.step(refined)
            self._step += 1
            self._renew_sketches()
        self._ledger.commit(number)
        return StepReport(step=self._step, noise_std=released.noise_std, num_steps_left=plan.num_steps - self._ledger.num_intents)

    def on_release(self, observer: Callable[[Released], None]) -> None:
        """Call `observer` with every release from now on, before the optimizer sees it.

        A release is public, and its tensors are reused afterwards: copy what is to be kept, and write into none of them.
        """
        self._observers.append(observer)

    @property
    def model(self) -> nn.Module:
        """The module under training."""
        return self._model

    @property
    def sketches(self) -> Mapping[str, Sketch]:
        """The sketch of each trainable parameter in the step under way: fixed before its batch, and public."""
        return MappingProxyType(dict(self._sketches))

    @property
    def history(self) -> History:
        """What the ledger has charged, as `(sampling_rate, noise_multiplier, num_steps)` of each run on this dataset, this one last.

        The entries name no sampler and no noise source; `epsilon` knows them, and `lowkey.epsilon` takes every entry for Poisson sampling.
        """
        return self._ledger.history()

    def _renew_sketches(self) -> None:
        # PRIVACY: the next step's bases are fixed here, from releases and public randomness, before its batch is seen.
        later = self._strategy.sketching.sketches(self._step + 1)
        if any(later[name] is not sketch for name, sketch in self._sketches.items()):
            self._adopt(later)

    def _adopt(self, sketches: Mapping[str, Sketch]) -> None:
        """Go on in other coordinates."""
        self._sketches, self._drawn = sketches, None
        self._slots.follow(sketches, self._strategy.space.subspaces(), self._strategy.on_refresh)
        self._gradients.use(sketches)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer; attach schedulers to it."""
        return self._slots.optimizer

    @property
    def num_steps_left(self) -> int:
        """How many releases the plan still allows."""
        return self._setting.plan.num_steps - self._ledger.num_intents

    @property
    def epsilon(self) -> float:
        """The ε spent so far at the plan's δ, every run in the ledger on this dataset included."""
        return self._ledger.epsilon(self._setting.plan.delta)

    def statement(self) -> Statement:
        """Return what may be said about the privacy of the weights, with everything that the number needs beside it."""
        setting = self._setting
        header, bound = setting.header, self._ledger.bound(setting.plan.delta)
        statement = dataclasses.replace(
            header.plan.statement(),
            epsilon=bound.epsilon,
            accountant=bound.accountant,
            num_steps=self._ledger.num_intents,
            clip_norm=header.clip_norm,
            method=header.method,
            noise_source=header.noise_source,
        )
        if not setting.method.has_guarantee:
            return statement.without_guarantee(f"{setting.method!r} neither clips nor adds noise; the plan's noise does not apply.")
        for caveat in self._caveats():
            statement = statement.with_caveat(caveat)
        return statement

    def _caveats(self) -> list[str]:
        plan, made = self._setting.plan, self._ledger.num_intents
        caveats: list[str] = []
        earlier = sum(steps for _, _, steps in self._ledger.history()) - made
        if earlier:
            caveats.append(
                f"The bound includes {earlier} releases of other runs on the dataset '{self._setting.dataset}' in the same ledger."
            )
        if num_drawn(plan) < self._step - self._resumed_at:
            caveats.append("The batches were not drawn by lowkey from this plan; that they follow its sampler is the caller's word.")
        if num_seeded(plan):
            caveats.append("The sampler was seeded; amplification by sampling holds only against those who do not know the seed.")
        return caveats

    # -- resuming and leaving ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs besides the model's own state and randomness."""
        return {
            **self._identity(),
            "run": header_to_json(self._ledger.header),
            "seed": self._setting.seed,
            "step": self._step,
            "optimizer": self.optimizer.state_dict(),
            "strategy": self._strategy.state_dict(),
            "ledger": dataclasses.asdict(self._ledger.head),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; load the model's own state first.

        Raises:
            ConfigError: The checkpoint is of another method, optimizer or model.
            LedgerError: The ledger is not the checkpoint's, or has lost releases since, or this run has other noise or sampling.

        Guarantee:
            Releases that were charged after the checkpoint stay charged.
        """
        self._check_open()
        if self._ledger.num_intents:
            raise ConfigError(
                f"this run has made {self._ledger.num_intents} steps already. "
                "A checkpoint is loaded before the first step. Call privatize again."
            )
        check_checkpoint(state, self._identity())
        # PRIVACY: the releases before the checkpoint are charged at this run's noise and rate, so those must be the ones that were used.
        check_same_run(header_from_json(state["run"]), self._setting.header)
        head = Head(**state["ledger"])
        self._ledger.close()
        self._ledger = open_ledger(self._setting.ledger, self._setting.header, resume=head)
        self._setting = dataclasses.replace(self._setting, seed=state["seed"])
        self._strategy = self._setting.method.start(self._start())
        self._strategy.load_state_dict(state["strategy"])
        self._step = self._resumed_at = state["step"]
        self._adopt(self._strategy.sketching.sketches(self._step + 1))
        self.optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        """Give the model back as it was, with its new weights."""
        if self._closed:
            return
        self._closed = True
        self._gradients.detach()
        self._ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- small parts ---------------------------------------------------------------------------------------------------

    def _identity(self) -> dict[str, Any]:
        return identify(self._setting.method, self.optimizer, self._parameters)

    def _start(self) -> Start:
        return Start(specs=self._specs, weights=self._parameters, seed=self._setting.seed, public_gradients=self._public_gradients)

    def _public_gradients(self, public: Public) -> Iterator[Mapping[str, Tensor]]:
        if self._is_attached:
            yield from self._gradients.public_gradients(public)
            return
        # A strategy may ask before there is anything to attach: its first sketches decide what is caught.
        identities = {name: Identity(name, tuple(parameter.shape)) for name, parameter in self._parameters.items()}
        passing = ClippedGradients(self._model, self._parameters, identities, math.inf, Execution(check_isolation=CheckIsolation.NEVER))
        try:
            yield from passing.public_gradients(public)
        finally:
            passing.detach()

    def _check_one_batch(self, drawn: int) -> None:
        if self._drawn is not None and drawn != self._drawn:
            # PRIVACY: an example that joins two batches of one release moves it by twice the clip norm.
            raise PrivacyBoundaryError(
                "a second batch was drawn for the plan before the first was released. An example may be in both, and would count twice. "
                "Call private.step() once for each batch, also for one that was interrupted, and cut large batches with lk.split()."
            )

    def _check_open(self) -> None:
        if self._closed:
            raise PrivacyBoundaryError("this Private object is closed, so its model trains without privacy. Call privatize again to go on.")
