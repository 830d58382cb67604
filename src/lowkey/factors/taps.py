"""Makes the forward passes of a model watched, and undoes it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage] # reason: the base of all layers with running statistics
from torch.utils import _pytree as pytree

from lowkey.errors import ConfigError, ShapeError, UnsupportedLayerError
from lowkey.factors.capture import Capture


class Tap:
    """Stands in for one module's `forward`, and runs it under the capture whenever gradients are on.

    A copy of the module, deep or pickled, has its own `forward` back: a copy is not private.
    """

    def __init__(self, module: nn.Module, capture: Capture) -> None:
        self._inner: Callable[..., Any] = module.forward
        self._module = module
        self._capture = capture
        self._watched = torch.compiler.disable(self._watch)
        functools.update_wrapper(self, self._inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward pass."""
        if torch.compiler.is_compiling():
            # The compiler ends its graph before a call that raises, and makes it as it stands; only fullgraph=True hands this on.
            raise UnsupportedLayerError(
                f"{type(self._module).__name__} is private and cannot be part of a compiled graph, which would hide its operations. "
                "Per-example gradients are taken operation by operation. Leave the model out of torch.compile, or leave out fullgraph=True."
            )
        _check_still(self._module)
        if not torch.is_grad_enabled() or self._capture.is_watching:
            return self._inner(*args, **kwargs)
        return self._watched(*args, **kwargs)

    def _watch(self, *args: Any, **kwargs: Any) -> Any:
        # PRIVACY: a compiled function would run as one operation, or with operations of its own; none is compiled while they are watched.
        with torch.compiler.set_stance("force_eager"), self._capture.watching():
            try:
                output = self._inner(*args, **kwargs)
            except RuntimeError as error:
                _explain(error, self._module, (args, kwargs))
                raise
            self._capture.adopt(dict(self._module.named_buffers()))
            return output

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return type(self._module).forward.__get__(memo.get(id(self._module), self._module))

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "forward")


def _explain(error: RuntimeError, module: nn.Module, inputs: object) -> None:
    """Say which device a batch is missing from, where that is why a forward pass failed."""
    homes = {parameter.device for parameter in module.parameters()}
    strays = [leaf.device for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.device not in homes]
    if strays and len(homes) == 1:
        (home,) = homes
        raise ShapeError(
            f"the batch is on {strays[0]}, and the model on {home}. Both must be on one device. Move the batch with .to('{home}')."
        ) from error


def _check_still(module: nn.Module) -> None:
    if isinstance(module, _NormBase) and module.training and module.running_mean is not None and not torch.is_grad_enabled():
        # PRIVACY: running statistics leave with the model's state_dict, and no noise was added to them.
        raise UnsupportedLayerError(
            f"{type(module).__name__} is in training mode, where every pass writes statistics of its batch into the model without noise, "
            "also a pass without gradients. A buffer may hold no private data. Call eval() on the layer after every model.train()."
        )


class Taps:
    """Sets a `Tap` on a model and on every module that holds a trainable parameter, its own or a child's.

    Only `forward` of the instances is set: no wrapper, no new name, no change to `state_dict`.
    """

    def __init__(self, model: nn.Module, capture: Capture, parameters: Mapping[str, Tensor]) -> None:
        self._tapped: list[tuple[nn.Module, object]] = []
        owned = {id(parameter) for parameter in parameters.values()}
        # The outermost module sees the whole pass; those inside are tapped too, for checkpointing calls them again in the backward pass.
        # Layers with running statistics are tapped because those move in a pass without gradients, which nobody watches.
        modules = [m for m in model.modules() if m is model or isinstance(m, _NormBase) or any(id(p) in owned for p in m.parameters())]
        for module in modules:
            if isinstance(module, torch.jit.ScriptModule):
                raise UnsupportedLayerError(
                    f"{type(module).__name__} is compiled by torch.jit, which hides its operations from the capture. "
                    "Per-example gradients are taken operation by operation. Pass the model as it was before torch.jit, or freeze it."
                )
            if isinstance(module.forward, Tap):
                raise ConfigError(
                    f"{type(module).__name__} is already private. One model can be attached once. "
                    "Call close() on the earlier Private object first, or build the model anew if that object is lost."
                )
        for module in modules:
            self._tapped.append((module, module.__dict__.get("forward")))
            module.forward = Tap(module, capture)

    def remove(self) -> None:
        """Give every module its own forward back."""
        for module, earlier in self._tapped:
            if earlier is None:
                del module.forward
            else:
                module.__dict__["forward"] = earlier
        self._tapped.clear()
