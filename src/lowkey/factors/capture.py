"""Watches the operations of a forward pass that trainable parameters take part in.

Every tensor has one of three roles:

    weight      a trainable parameter, or something computed from parameters alone
    constant    a buffer, a frozen parameter, or something computed without weights and data (positions, masks)
    data        everything else

An operation on weights alone yields a weight; on constants alone, a constant.
Where a weight meets data, a rule of the registry takes over.
Anything unknown counts as data: a mistake that way leads to a refusal, never to a gradient given to the wrong example.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lowkey.errors import ConfigError, UnsupportedLayerError
from lowkey.factors.collector import Axis, Collector, Derived, Weight
from lowkey.factors.factor import Side
from lowkey.factors.registry import GUARDS, RULES, Call, Operation, anything


@dataclass(frozen=True)
class Site:
    """One use of one weight: what a rule records into.

    `transposed` means that the operation sees the transpose of the stored parameter.
    """

    collector: Collector
    target: Weight | Derived
    transposed: bool

    @property
    def label(self) -> str:
        return self.target.label if isinstance(self.target, Derived) else self.target.name

    @property
    def weight(self) -> Weight | None:
        """The parameter itself, where no transposition or derivation lies between."""
        return self.target if isinstance(self.target, Weight) and not self.transposed else None

    def keep(self, inputs: Tensor, axis: Axis) -> Tensor:
        """Reduce an input to what the backward pass will need of it."""
        if isinstance(self.target, Derived):
            return inputs.detach()
        return self.collector.keep(self.target, inputs, axis.other if self.transposed else axis)

    def record_outer(self, rows: Side, cols: Side, kept: Axis | None = None) -> None:
        """Record `sum_t rows_t cols_t^T` per example, in the orientation that the operation sees."""
        if self.transposed:
            rows, cols, kept = cols, rows, None if kept is None else kept.other
        self.collector.record_outer(self.target, rows, cols, kept)

    def record_dense(self, gradients: Tensor) -> None:
        """Record one gradient per row of the batch, `(rows, *shape)`."""
        self.collector.record_dense(self.target, gradients.transpose(-1, -2) if self.transposed else gradients)


@dataclass(frozen=True)
class Alias:
    """A parameter under another dtype or transposed: the same coordinates."""

    weight: Weight
    transposed: bool


@dataclass(frozen=True)
class Recipe:
    """How a derived tensor was computed, to do it again example by example if it turns out to be aligned with the batch."""

    derived: Derived
    function: Operation
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


_SAME = {
    Tensor.to, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.type, Tensor.type_as,
    Tensor.contiguous, Tensor.clone, torch.clone,
}  # fmt: skip
_TURN = {Tensor.t, torch.t, Tensor.T.__get__, Tensor.mT.__get__}  # type: ignore[attr-defined] # reason: getset descriptors have __get__
_SWAP = {Tensor.transpose, torch.transpose, Tensor.swapaxes, torch.swapaxes}


class Capture(TorchFunctionMode):
    """The function mode that is active while a private model runs forward with gradients.

    Fields:
        collector: Receives the factors when the backward pass runs.
        anchor: A leaf that makes captured operations part of the graph; its own gradient is never computed.
    """

    def __init__(self, collector: Collector, weights: Mapping[str, Weight], parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.collector = collector
        self.anchor = torch.zeros((), requires_grad=True)
        self._parameters = dict(parameters)  # holds the tensors, so that their ids stay theirs
        self._weights = {id(parameters[name]): weight for name, weight in weights.items()}
        self._constants: dict[int, tuple[str, Tensor]] = {}
        self._known: dict[int, tuple[Tensor, Alias | Recipe | None]] = {}
        self._local = threading.local()

    # -- roles ---------------------------------------------------------------------------------------------------------

    def role(self, tensor: Tensor) -> Alias | Recipe | None | bool:
        """Return how `tensor` is a weight (`Alias`, `Recipe`), None for a constant, True for data."""
        weight = self._weights.get(id(tensor))
        if weight is not None:
            return Alias(weight, False)
        if id(tensor) in self._constants:
            return None
        known = self._known.get(id(tensor))
        return True if known is None else known[1]

    def site(self, tensor: Tensor) -> Site | None:
        """Return where to record the gradient of `tensor`, or None if it is not a weight."""
        role = self.role(tensor)
        if isinstance(role, Alias):
            return Site(self.collector, role.weight, role.transposed)
        if isinstance(role, Recipe):
            return Site(self.collector, role.derived, False)
        return None

    def recipe(self, tensor: Tensor) -> Recipe | None:
        """Return how a derived tensor came about."""
        role = self.role(tensor)
        return role if isinstance(role, Recipe) else None

    def is_weight(self, value: object) -> bool:
        return isinstance(value, Tensor) and isinstance(self.role(value), Alias | Recipe)

    def is_data(self, value: object) -> bool:
        return isinstance(value, Tensor) and self.role(value) is True

    # -- the watch -----------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Operation, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        weights: list[Tensor] = []
        has_data = False
        for tensor in _tensors(args, kwargs):
            role = self.role(tensor)
            if role is True:
                has_data = True
            elif role is not None:
                weights.append(tensor)
        if has_data:
            self._refuse_leaks(func, args)
            if func in GUARDS:
                GUARDS[func](*args, **kwargs)
            if weights and torch.is_grad_enabled():
                return self._meet(Call(self, func, args, kwargs))
            output = func(*args, **kwargs)
            self._forget_overwritten(func, args, kwargs, output)
            return output
        output = func(*args, **kwargs)
        self._note(func, args, kwargs, weights, output)
        return output

    def _meet(self, call: Call) -> Any:
        return RULES.get(call.function, RULES[anything])(call)

    def _note(self, func: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any], weights: list[Tensor], output: Any) -> None:
        """Give the outputs of an operation without data their role."""
        for tensor in _tensors((output,), {}):
            if id(tensor) in self._weights or id(tensor) in self._constants:
                continue
            if not weights or not tensor.requires_grad:
                self._known[id(tensor)] = (tensor, None)
                continue
            role = self.role(weights[0])
            turned = _orientation(func, args, kwargs)
            if isinstance(role, Alias) and turned is not None and len(weights) == 1:
                self._known[id(tensor)] = (tensor, Alias(role.weight, role.transposed != turned))
            else:
                self._known[id(tensor)] = (tensor, Recipe(Derived(tensor, self._names(weights)), func, args, kwargs))

    def _names(self, weights: Sequence[Tensor]) -> tuple[str, ...]:
        names: dict[str, None] = {}
        for tensor in weights:
            role = self.role(tensor)
            if isinstance(role, Alias):
                names[role.weight.name] = None
            elif isinstance(role, Recipe):
                names.update(dict.fromkeys(role.derived.names))
        return tuple(names)

    def _refuse_leaks(self, func: Operation, args: tuple[Any, ...]) -> None:
        # PRIVACY: a buffer that is updated from a batch would carry un-noised private data out with the model.
        name = getattr(func, "__name__", "")
        if name.endswith("_") and not name.endswith("__") and args and isinstance(args[0], Tensor) and id(args[0]) in self._constants:
            buffer = self._constants[id(args[0])][0]
            raise UnsupportedLayerError(
                f"'{buffer}' is updated in place from the batch ({name}), which would publish private data without noise. "
                "Switch that statistic off (track_running_stats=False, eval mode), or compute it from public data beforehand."
            )

    def _forget_overwritten(self, func: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """A constant that data was written into is data."""
        if self._known and args and (output is args[0] or func is Tensor.__setitem__):
            self._known.pop(id(args[0]), None)
        if "out" in kwargs:
            self._known.pop(id(kwargs["out"]), None)

    def forget(self) -> None:
        """Let go of the constants and derived weights of past forward passes."""
        self._known.clear()

    # -- where it is active --------------------------------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch until the block ends; inside another watched block this does nothing."""
        if getattr(self._local, "depth", 0):
            yield
            return
        if not self.collector.is_expecting:
            self.forget()
        self._local.depth = 1
        try:
            with self:
                yield
        finally:
            self._local.depth = 0
            self.collector.forget_inputs()

    def use(self, weights: Mapping[str, Weight]) -> None:
        """Sketch with new weights from the next forward pass on."""
        self._weights = {id(self._parameters[name]): weight for name, weight in weights.items()}
        self.collector.use(weights)

    def set_constants(self, constants: Mapping[str, Tensor]) -> None:
        """Declare buffers and frozen parameters."""
        self._constants = {id(tensor): (name, tensor) for name, tensor in constants.items()}


class Taps:
    """Makes a model's modules watched, and undoes it.

    Only `forward` of the instances is set: no wrapper, no new name, no change to `state_dict`.
    """

    def __init__(self, model: nn.Module, capture: Capture, parameters: Mapping[str, Tensor]) -> None:
        self._tapped: list[tuple[nn.Module, object]] = []
        owned = {id(parameter) for parameter in parameters.values()}
        for module in model.modules():
            # The outermost module sees the whole pass; the owners are watched too, because checkpointing calls them again from the backward pass.
            if module is model or any(id(parameter) in owned for parameter in module.parameters(recurse=False)):
                self._tap(module, capture)

    def _tap(self, module: nn.Module, capture: Capture) -> None:
        inner: Callable[..., Any] = module.forward
        if getattr(inner, "is_lowkey_tap", False):
            raise ConfigError(
                f"{type(module).__name__} is already private. One model can be attached once. Call close() on the earlier Private object first."
            )

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return inner(*args, **kwargs)
            with capture.watching():
                return inner(*args, **kwargs)

        forward.is_lowkey_tap = True  # type: ignore[attr-defined] # reason: marks the function, so that a second attachment is refused
        self._tapped.append((module, module.__dict__.get("forward")))
        module.forward = forward

    def remove(self) -> None:
        """Give every module its own forward back."""
        for module, earlier in self._tapped:
            if earlier is None:
                del module.forward
            else:
                module.__dict__["forward"] = earlier
        self._tapped.clear()


def _orientation(func: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool | None:
    """Return whether `func` only renames a matrix: False as it is, True transposed, None if it does more."""
    if func in _SAME:
        return False
    if not args or not isinstance(args[0], Tensor) or args[0].dim() != 2:
        return None
    if func in _TURN:
        return True
    if func in _SWAP and not kwargs and len(args) == 3:
        return args[1] % 2 != args[2] % 2
    return None


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value, {})
