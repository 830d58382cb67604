"""Watches the operations of a forward pass that trainable parameters take part in.

Every tensor has one of three roles:

    weight      a trainable parameter, or something computed from parameters alone
    constant    a buffer, a frozen parameter, or something computed without weights and data (positions, masks)
    data        everything else

An operation on weights alone yields a weight; on constants alone, a constant.
Where a weight meets data, a rule of the registry takes over.
Anything unknown counts as data: a mistake that way leads to a refusal, never to a gradient given to the wrong example.
A tensor that is written to takes the role of what is written; a constant stays one from pass to pass for as long as the model keeps it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lowkey.errors import UnsupportedLayerError
from lowkey.factors.collector import Axis, Collector, Derived, Weight
from lowkey.factors.factor import Side
from lowkey.factors.inputs import ACTIVATIONS, Kept
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

    def keep(self, inputs: Tensor, axis: Axis) -> Kept:
        """Reduce an input to what the backward pass will need of it."""
        if isinstance(self.target, Derived):
            return Kept(inputs.detach())
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


Role = Alias | Recipe | bool | None
"""How a tensor is a weight (`Alias`, `Recipe`), None for a constant, True for data."""


@dataclass(frozen=True)
class _Known:
    """The role of a tensor as of one version of its contents.

    A constant is held weakly, so that its entry lasts as long as the tensor does; a weight is held until the pass is over.
    """

    tensor: weakref.ref[Tensor] | Tensor
    version: int
    role: Alias | Recipe | None
    may_grow: bool
    """Whether weights may be written into this constant later on; not where autograd was off, as inside a custom function."""


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
        self._storages: dict[int, str] | None = None
        self._known: dict[int, _Known] = {}
        self._local = threading.local()

    # -- roles ---------------------------------------------------------------------------------------------------------

    def role(self, tensor: Tensor) -> Role:
        """Return how `tensor` is a weight (`Alias`, `Recipe`), None for a constant, True for data."""
        key = id(tensor)
        weight = self._weights.get(key)
        if weight is not None:
            return Alias(weight, False)
        known = self._known.get(key)
        if known is None:
            return None if key in self._constants else True
        if known.role is None:
            return self._grown(tensor) if tensor.requires_grad and known.may_grow else None
        return known.role if known.version == tensor._version else self._grown(tensor)

    def _grown(self, tensor: Tensor) -> Recipe:
        """Note a tensor that weights or constants were written into, perhaps through a view of it."""
        recipe = Recipe(Derived(tensor, tuple(self._parameters)), _written, (), {})
        self._remember(tensor, recipe)
        return recipe

    def _remember(self, tensor: Tensor, role: Alias | Recipe | None) -> None:
        key = id(tensor)
        version = 0 if tensor.is_inference() else tensor._version
        held = tensor if role is not None else weakref.ref(tensor, lambda _: self._known.pop(key, None))
        self._known[key] = _Known(held, version, role, torch.is_grad_enabled())

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
        values = _metadata_free(func, args, kwargs) if func in _SHAPED_LIKE else (*args, *kwargs.values())
        for tensor in _tensors(values):
            role = self.role(tensor)
            if role is True:
                has_data = True
            elif role is not None:
                weights.append(tensor)
        if has_data:
            for target in _written_to(func, args, kwargs):
                self._overwrite(target, func)
            if func in GUARDS:
                GUARDS[func](*args, **kwargs)
            if weights and torch.is_grad_enabled():
                return self._meet(Call(self, func, args, kwargs))
            output = func(*args, **kwargs)
            if func in ACTIVATIONS:
                self.collector.inputs.note(func, args, kwargs, output)
            return output
        output = func(*args, **kwargs)
        self._note(func, args, kwargs, weights, output)
        return output

    def _meet(self, call: Call) -> Any:
        return RULES.get(call.function, RULES[anything])(call)

    def _note(self, func: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any], weights: list[Tensor], output: Any) -> None:
        """Give the outputs of an operation without data their role."""
        written = _written_to(func, args, kwargs)
        for tensor in (*_tensors((output,)), *written):
            if id(tensor) in self._weights or id(tensor) in self._constants:
                continue
            if not weights or not tensor.requires_grad or func is Tensor.detach:
                self._remember(tensor, None)
                continue
            role = self.role(weights[0])
            turned = None if written else _orientation(func, args, kwargs)
            if isinstance(role, Alias) and turned is not None and len(weights) == 1:
                self._remember(tensor, Alias(role.weight, role.transposed != turned))
            else:
                function = _written if written else func
                self._remember(tensor, Recipe(Derived(tensor, self._names(weights)), function, args, kwargs))

    def _names(self, weights: Sequence[Tensor]) -> tuple[str, ...]:
        names: dict[str, None] = {}
        for tensor in weights:
            role = self.role(tensor)
            if isinstance(role, Alias):
                names[role.weight.name] = None
            elif isinstance(role, Recipe):
                names.update(dict.fromkeys(role.derived.names))
        return tuple(names)

    # -- writes --------------------------------------------------------------------------------------------------------

    def _overwrite(self, target: Tensor, func: Operation) -> None:
        """Data is about to be written into `target`: refuse it, or make data of whatever shares its memory."""
        storage = _storage(target)
        name = self._owner(target, storage)
        if name is not None:
            # PRIVACY: a buffer that is updated from a batch would carry un-noised private data out with the model.
            raise UnsupportedLayerError(
                f"'{name}' is updated in place from the batch ({func.__name__}), which would publish private data without noise. "
                "Switch that statistic off (track_running_stats=False, eval mode), or compute it from public data beforehand."
            )
        known = self._known.get(id(target))
        if known is None:
            return
        if self.is_weight(target) and torch.is_grad_enabled():
            raise UnsupportedLayerError(
                f"{func.__name__} writes data into a tensor that was computed from weights alone, so it has no gradient per example. "
                "Use the operation that returns a new tensor, as x + y in place of x += y."
            )
        for key, other in list(self._known.items()):
            tensor = other.tensor if isinstance(other.tensor, Tensor) else other.tensor()
            if tensor is not None and other.role is None and (tensor is target or (storage and _storage(tensor) == storage)):
                del self._known[key]

    def _owner(self, target: Tensor, storage: int) -> str | None:
        """Return the buffer or parameter whose memory `target` lies in."""
        if id(target) in self._constants:
            return self._constants[id(target)][0]
        if self._storages is None:
            owned = {**dict(self._constants.values()), **self._parameters}
            self._storages = {_storage(tensor): name for name, tensor in owned.items()}
            self._storages.pop(0, None)
        return self._storages.get(storage)

    def adopt(self, buffers: Mapping[str, Tensor]) -> None:
        """Take note of the buffers that a forward pass has put in place of earlier ones.

        Raises:
            UnsupportedLayerError: One of them was computed from the batch.
        """
        for name, buffer in buffers.items():
            if id(buffer) in self._constants:
                continue
            if self.is_data(buffer):
                # PRIVACY: as with writing in place, the buffer would leave with the model's state_dict.
                raise UnsupportedLayerError(
                    f"the buffer '{name}' was replaced by a value computed from the batch, which would publish private data without noise. "
                    "A buffer may hold no private data. Do not register such a value, or compute it from public data beforehand."
                )
            self._constants[id(buffer)] = (name, buffer)

    def forget(self) -> None:
        """Let go of the derived weights of past forward passes; constants go when the model lets go of them."""
        for key in [key for key, known in self._known.items() if known.role is not None]:
            del self._known[key]

    # -- where it is active --------------------------------------------------------------------------------------------

    @property
    def is_watching(self) -> bool:
        """Whether this thread is inside a watched block."""
        return bool(getattr(self._local, "depth", 0))

    @contextmanager
    def watching(self) -> Generator[None]:
        """Watch until the block ends; inside another watched block this does nothing."""
        if self.is_watching:
            yield
            return
        if not self.collector.is_expecting:
            self.forget()
        self._storages = None
        self._local.depth = 1
        try:
            with self:
                yield
        finally:
            self._local.depth = 0
            self.collector.inputs.forget()

    def use(self, weights: Mapping[str, Weight]) -> None:
        """Sketch with new weights from the next forward pass on."""
        self._weights = {id(self._parameters[name]): weight for name, weight in weights.items()}
        self.collector.use(weights)

    def set_constants(self, constants: Mapping[str, Tensor]) -> None:
        """Declare buffers and frozen parameters."""
        self._constants = {id(tensor): (name, tensor) for name, tensor in constants.items()}


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


_MAKERS = {Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty, Tensor.new_tensor}
"""Operations that read no value of their first argument."""

_SHAPED_LIKE = {Tensor.to, Tensor.type_as, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as, *_MAKERS}
"""Operations that read the shape or the dtype of one of their arguments and none of its values."""


def _metadata_free(func: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    """Return the arguments whose values an operation of `_SHAPED_LIKE` reads."""
    return (*args[1:], *kwargs.values()) if func in _MAKERS else args[:1]


def _written(*_args: object) -> None:
    """Stand for the writes that made a derived tensor what it is."""


_ARITHMETIC = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_IN_PLACE = {"__setitem__", "__set__", *(f"__i{name}__" for name in _ARITHMETIC)}
_WRITES: dict[Operation, bool] = {}


def _writes(func: Operation) -> bool:
    """Whether `func` writes into its first argument."""
    known = _WRITES.get(func)
    if known is None:
        name = getattr(func, "__name__", "")
        known = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__") and name not in ("requires_grad_", "retain_grad_"))
        _WRITES[func] = known
    return known


def _written_to(func: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that a call writes into."""
    targets = list(args[:1]) if _writes(func) else []
    if kwargs:
        targets += [kwargs["out"]] if "out" in kwargs else []
        targets += list(args[:1]) if kwargs.get("inplace") is True else []
    return list(_tensors(targets)) if targets else []


def _storage(tensor: Tensor) -> int:
    """Return where a tensor's memory begins; 0 if it has none of its own."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return 0
    return tensor.untyped_storage().data_ptr()


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
