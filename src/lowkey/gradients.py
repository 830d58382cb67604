"""The private half of a step: factors → sketch → clip → sum, for a model that stays the module that it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowkey.boundary import PerExample, Public, Sensitive
from lowkey.errors import ConfigError, ShapeError, UnsupportedLayerError
from lowkey.execution import CheckIsolation, Execution
from lowkey.factors import Capture, Collector, Factor, Record, Taps, Weight, check_isolation, isolation_weights, probe, wide_dtype
from lowkey.release import ClipGroup, ClippedSum, open_declared
from lowkey.sample import split
from lowkey.sketch import Identity, Sketch

Losses = Tensor | Callable[[], Tensor]
"""One loss per example, or a function that runs the model and returns them."""

_PUBLIC_NUMBERS = 1 << 26
"""Public examples are taken a few at a time, so that their gradients hold about this many numbers."""


class ClippedGradients:
    """Sums a model's clipped per-example gradients between two releases.

    Life cycle: `add` as often as memory asks for, `take` once a step, `use` when the sketches change; `detach` gives the model back.

    Guarantee:
        What `take` returns moves by at most the clip norm when one example joins or leaves.
        While attached, no raw gradient is left on a parameter of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        sketches: Mapping[str, Sketch],
        clip_norm: float,
        execution: Execution,
        *,
        clip_groups: Sequence[ClipGroup] = (),
        probe_scale: float | None = None,
    ) -> None:
        self._model = model
        self._parameters = dict(parameters)
        self.device = _one_device(parameters)
        self._sketches = dict(sketches)
        self._weights = _weights(parameters, sketches)
        self._collector = Collector(self._weights, parameters)
        self._capture = Capture(self._collector, self._weights, parameters)
        dtypes = {wide_dtype(parameter.dtype) for parameter in parameters.values()}
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self.sum = ClippedSum(_block_shapes(sketches), clip_norm, dtype, self.device, clip_groups)
        self._probe_scale = probe_scale
        self._check = execution.check_isolation
        self._is_isolated = self._check is CheckIsolation.NEVER
        self._shown: set[str] = set()
        self._has_shown_single_rows = False
        self._has_examples = False
        self._capture.set_constants(_constants(model, parameters))
        self._taps = Taps(model, self._capture, parameters)
        self._wanted = _require_gradients(model, parameters)

    def add(self, losses: Losses) -> None:
        """Take each example's gradient, clip it, and add it."""
        if self._probe_scale is not None:
            per_example = self._probed(losses, self._probe_scale)
        else:
            per_example = self._differentiated(losses if isinstance(losses, Tensor) or not callable(losses) else _run(losses))
        if per_example is not None:
            self.sum.add(per_example)
            self._has_examples = True

    def public_gradients(self, public: Public) -> Iterator[Mapping[str, Tensor]]:
        """Take the full gradient of each public example at the weights of the moment, a few examples at a time."""
        numel = sum(parameter.numel() for parameter in self._parameters.values())
        for part in split(public.examples, max(1, _PUBLIC_NUMBERS // numel)):
            yield self._of_public(public, part)

    def take(self) -> Sensitive:
        """Return the sum since the last call, and start again from zero."""
        return self.sum.take()

    def use(self, sketches: Mapping[str, Sketch]) -> None:
        """Go on in other coordinates, with an empty sum."""
        self.sum.take()
        self.sum.set_shapes(_block_shapes(sketches))
        self._sketches, self._weights = dict(sketches), _weights(self._parameters, sketches)
        self._capture.use(self._weights)

    def check_reached(self) -> None:
        """Check that every trainable parameter has had a gradient by now.

        Raises:
            ConfigError: If examples were seen, and some parameter was never reached.
        """
        missing = [name for name in self._parameters if name not in self._collector.reached]
        is_blind = self._probe_scale is not None and self._check is CheckIsolation.NEVER
        if self._has_examples and missing and not is_blind:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ConfigError(
                f"'{missing[0]}'{more} is trainable, but no backward pass has reached it. It would receive noise and no signal. "
                "Use it in the loss, or freeze it: requires_grad_(False), or trainable= without it."
            )

    def detach(self) -> None:
        """Give the model back as it was."""
        self._taps.remove()
        for parameter, wanted in self._wanted:
            parameter.requires_grad_(wanted)

    def _differentiated(self, losses: object) -> PerExample[Factor] | None:
        losses = _checked(losses, self.device)
        if not losses.numel():
            return None
        _check_attached(losses)
        try:
            if self._is_due(losses):
                self._compare(losses)
            else:
                self._run_backward(losses, torch.ones_like(losses))
                self._check_all_have_losses(losses)
            return self._collector.finish()
        finally:
            self._collector.abandon()
            self._capture.forget()

    def _probed(self, losses: Losses, scale: float) -> PerExample[Factor] | None:
        if isinstance(losses, Tensor) or not callable(losses):
            raise ConfigError(
                f"backward was given a {type(losses).__name__}, and this method takes each loss twice, at two weights. "
                "It needs a function that runs the model and returns one loss per example. "
                "Write private.backward(lambda: loss(model(x), y)); every other method takes that as well."
            )
        if self._check is CheckIsolation.ALWAYS or not self._is_isolated:
            # Gradients show what losses alone cannot: coupled examples, and parameters that nothing reaches.
            self._differentiated(_run(losses))
        ((block, shape),) = _block_shapes(self._sketches).items()
        one = torch.ones(shape, dtype=self.sum.dtype, device=self.device)
        directions = {name: sketch.decode({block: one}) for name, sketch in self._sketches.items()}
        return probe(lambda: _checked(losses(), self.device), self._parameters, directions, scale=scale, block=block)

    def _is_due(self, losses: Tensor) -> bool:
        return len(losses) > 1 and (self._check is CheckIsolation.ALWAYS or not self._is_isolated)

    def _compare(self, losses: Tensor) -> None:
        """Run two backward passes, the first over weighted losses, and compare what they leave."""
        weights = isolation_weights(losses)
        self._run_backward(losses, weights, Record.NORMS, again=True)
        weighted = self._collector.take_norms()
        self._run_backward(losses, torch.ones_like(losses), Record.BOTH)
        plain = self._collector.take_norms()
        self._shown |= check_isolation(weights, weighted, plain)
        self._has_shown_single_rows |= self._collector.has_one_row_a_loss
        # PRIVACY: a gradient that was zero or missing so far has shown nothing, so the next batch is checked as well.
        self._is_isolated = self._shown.issuperset(self._parameters)

    def _check_all_have_losses(self, losses: Tensor) -> None:
        """Refuse losses of a part of the examples that the model ran on, for rows are credited to losses in order."""
        # PRIVACY: were an example left out, a loss would be credited with the rows of two, and both would share one limit.
        if len(losses) > 1 and self._has_shown_single_rows and not self._collector.has_one_row_a_loss:
            raise ShapeError(
                f"{len(losses)} losses were given, and each operation of the model had several rows for each, where some had one before. "
                "Rows are credited to losses in order, so each example that the model runs on needs its loss. "
                "Multiply the losses of unwanted examples by zero in place of dropping them, or run the model on the others only. "
                "If a loss really has several rows, pass execution=Execution(check_isolation=CheckIsolation.ALWAYS)."
            )

    def _of_public(self, public: Public, part: Any) -> Mapping[str, Tensor]:
        reached = set(self._collector.reached)
        self._capture.use(_weights(self._parameters, _identities(self._parameters)))
        try:
            losses = _checked(_run(lambda: public.loss(self._model, part)), self.device)
            _check_attached(losses)
            self._run_backward(losses, torch.ones_like(losses))
            factors = open_declared(self._collector.finish(), public)
        finally:
            self._collector.abandon()
            self._capture.forget()
            self._capture.use(self._weights)
            # What public examples reach says nothing of what the private loss will.
            self._collector.reached.intersection_update(reached)
        return {
            name: factors[name].dense().reshape(len(losses), *parameter.shape)
            if name in factors
            else torch.zeros(len(losses), *parameter.shape, dtype=wide_dtype(parameter.dtype), device=self.device)
            for name, parameter in self._parameters.items()
        }

    def _run_backward(self, losses: Tensor, weights: Tensor, record: Record = Record.FACTORS, *, again: bool = False) -> None:
        self._collector.begin(len(losses), record)
        try:
            torch.autograd.backward(losses, weights, retain_graph=again)
        finally:
            # PRIVACY: no raw gradient may stay where an optimizer, a hook or a log could read it, also after a pass that failed.
            raw = _drop_gradients(self._model)
        late = [name for name in raw if name not in self._parameters]
        if late:
            raise ConfigError(
                f"'{late[0]}' requires gradients and was not among the trained parameters when the model became private. "
                "Its gradient would have neither limit nor noise. Freeze it with requires_grad_(False), or close() and attach it again."
            )
        if raw:
            raise UnsupportedLayerError(
                f"'{raw[0]}' was used where lowkey cannot see it, so its gradient arrived summed over the batch. "
                "Uses before privatize, in a custom autograd.Function, or outside the forward pass of the model's modules are not caught. "
                "Compute with it inside a module's forward after privatize, or freeze it with requires_grad_(False)."
            )


def _weights(parameters: Mapping[str, nn.Parameter], sketches: Mapping[str, Sketch]) -> dict[str, Weight]:
    return {name: Weight(name=name, shape=tuple(parameter.shape), compression=sketches[name]) for name, parameter in parameters.items()}


def _block_shapes(sketches: Mapping[str, Sketch]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for sketch in sketches.values():
        shapes.update(sketch.blocks)
    return shapes


def _drop_gradients(model: nn.Module) -> list[str]:
    """Take every gradient off the parameters, and return the names of those that had one."""
    found = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    for parameter in model.parameters():
        parameter.grad = None
    return found


def _constants(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    frozen = {name: parameter for name, parameter in model.named_parameters() if name not in parameters}
    return {**dict(model.named_buffers()), **frozen}


def _require_gradients(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> list[tuple[nn.Parameter, bool]]:
    """Let exactly the trained parameters require gradients, and return what each had before."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in parameters)
        parameter.grad = None
    return before


def _one_device(parameters: Mapping[str, nn.Parameter]) -> torch.device:
    devices = {parameter.device: name for name, parameter in parameters.items()}
    if len(devices) > 1:
        raise ConfigError(
            f"the trainable parameters lie on {sorted(map(str, devices))}. One process trains on one device. Move the model to one of them."
        )
    return next(iter(devices))


def _identities(parameters: Mapping[str, nn.Parameter]) -> dict[str, Sketch]:
    return {name: Identity(name, tuple(parameter.shape)) for name, parameter in parameters.items()}


def _run(losses: Callable[[], Tensor]) -> Tensor:
    """Run the model with gradients on, wherever it is called."""
    with torch.enable_grad():
        return losses()


def _checked(losses: object, device: torch.device) -> Tensor:
    if not isinstance(losses, Tensor):
        raise ShapeError(f"losses is a {type(losses).__name__}. backward needs a tensor with one loss per example. Use reduction='none'.")
    if losses.dim() != 1:
        raise ShapeError(
            f"losses has shape {tuple(losses.shape)}. "
            "backward needs shape (B,), one loss per example, because each example is clipped on its own. "
            "Use reduction='none', and average over an example's own tokens, never over the batch."
        )
    if losses.device != device:
        raise ShapeError(
            f"losses is on {losses.device}, and the model on {device}. Both must be on one device. Move the batch with .to('{device}')."
        )
    return losses


def _check_attached(losses: Tensor) -> None:
    if not losses.requires_grad:
        raise ShapeError(
            "losses does not depend on any trainable parameter. "
            "It must come from a forward pass with gradients on. Leave no_grad, and do not detach the output."
        )
