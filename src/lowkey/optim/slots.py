"""Slots: for each parameter, the tensor that the optimizer steps.

A slot is the weight itself, or a proxy in the shape of a sketch's coordinates.
A proxy starts every step at zero, so what the optimizer leaves in it is its step; that step is decoded into the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from lowkey.boundary import Released
from lowkey.errors import ConfigError
from lowkey.sketch.sketch import Sketch, Subspace

OptimizerFactory = Callable[[Any], torch.optim.Optimizer]
"""Called with the tensors to step, or with parameter groups; returns a torch optimizer."""

GroupOptions = Callable[[str], Mapping[str, Any]]
"""Optimizer options of a parameter, by its name."""


class OnRefresh(Enum):
    """What becomes of the optimizer's moments when a basis is redrawn."""

    KEEP = "keep"
    ROTATE = "rotate"
    RESET = "reset"


class Slots:
    """Steps a model's parameters from released coordinates.

    Args:
        parameters: The weights, by name.
        sketches: How each parameter's coordinates are decoded.
        subspaces: The parameters whose optimizer state lives in their sketch's coordinates.
        optimizer: Makes the optimizer.
        groups: Optimizer options by parameter name.

    Guarantee:
        Reads released values, weights and optimizer state only, so it is post-processing.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        sketches: Mapping[str, Sketch],
        subspaces: Mapping[str, Subspace],
        optimizer: OptimizerFactory,
        groups: GroupOptions | None,
    ) -> None:
        self._parameters = dict(parameters)
        self._sketches = dict(sketches)
        self._subspaces = dict(subspaces)
        self._slots = {name: _slot(parameter, subspaces.get(name)) for name, parameter in parameters.items()}
        self.optimizer = _build(optimizer, self._slots, groups)
        self._names = {id(slot): name for name, slot in self._slots.items()}

    def step(self, released: Released) -> None:
        """Let the optimizer take one step along the released gradient, and decode it."""
        for name, slot in self._slots.items():
            subspace = self._subspaces.get(name)
            gradient = self._sketches[name].decode(released.blocks) if subspace is None else released.blocks[name]
            slot.grad = gradient.to(slot.dtype).reshape(slot.shape)
        self._decay()
        self.optimizer.step()
        with torch.no_grad():
            for name, subspace in self._subspaces.items():
                subspace.add_decoded(self._parameters[name], self._slots[name])
                self._slots[name].zero_()
        for slot in self._slots.values():
            slot.grad = None

    def _decay(self) -> None:
        """Apply weight decay to the real weights; the optimizer sees proxies at zero, which do not decay."""
        for group in self.optimizer.param_groups:
            decay = group.get("weight_decay", 0.0)
            names = [self._names[id(slot)] for slot in group["params"] if self._names[id(slot)] in self._subspaces]
            for name in names if decay else []:
                self._decay_one(name, group, decay)

    @torch.no_grad()
    def _decay_one(self, name: str, group: Mapping[str, Any], decay: float) -> None:
        weight = self._parameters[name]
        if _is_decoupled(self.optimizer, group):
            weight.mul_(1 - group["lr"] * decay)
            return
        gradient = self._slots[name].grad
        if gradient is not None:
            gradient.add_(self._subspaces[name].encode(weight.detach()), alpha=-decay if group.get("maximize") else decay)

    def refresh(self, sketches: Mapping[str, Sketch], subspaces: Mapping[str, Subspace], policy: OnRefresh) -> None:
        """Go on in new bases, and carry the optimizer's moments over as `policy` says."""
        for name, later in subspaces.items():
            earlier = self._subspaces[name]
            if later is not earlier:
                self._carry(self.optimizer.state.get(self._slots[name], {}), earlier, later, policy)
        self._sketches, self._subspaces = dict(sketches), dict(subspaces)

    def _carry(self, state: dict[str, Any], earlier: Subspace, later: Subspace, policy: OnRefresh) -> None:
        moments = {key: value for key, value in state.items() if isinstance(value, Tensor) and value.shape == earlier.proxy_shape}
        if policy is OnRefresh.RESET:
            for value in moments.values():
                value.zero_()
        elif policy is OnRefresh.ROTATE:
            rotation = earlier.rotation_to(later)
            if rotation is None:
                return
            for key in moments.keys() & _SIGNED_MOMENTS:
                moments[key].copy_(earlier.rotate(moments[key], rotation))


_SIGNED_MOMENTS = {"exp_avg", "momentum_buffer"}
"""State entries that transform like a gradient; squares do not rotate."""


def _slot(parameter: nn.Parameter, subspace: Subspace | None) -> nn.Parameter:
    if subspace is None:
        return parameter
    return nn.Parameter(torch.zeros(subspace.proxy_shape, dtype=parameter.dtype, device=parameter.device))


def _build(factory: OptimizerFactory, slots: Mapping[str, nn.Parameter], groups: GroupOptions | None) -> torch.optim.Optimizer:
    tensors: Sequence[Any] = list(slots.values())
    if groups is not None:
        tensors = [{"params": [slot], **groups(name)} for name, slot in slots.items()]
    optimizer = factory(tensors)
    if not isinstance(optimizer, torch.optim.Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance] # reason: users pass what they like
        raise ConfigError(
            f"optimizer made a {type(optimizer).__name__}. It must be a function that takes tensors and returns a torch optimizer. "
            "Pass functools.partial(torch.optim.AdamW, lr=1e-3)."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "LBFGS evaluates the loss several times in a step, and each one would be a release. A step is one release. Use SGD or Adam."
        )
    stepped = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    missing = [name for name, slot in slots.items() if id(slot) not in stepped]
    if missing or len(stepped) != len(slots):
        raise ConfigError(
            f"the optimizer was not given exactly the tensors it was called with (missing: {missing[:3]}). "
            "With a sketch the optimizer steps proxies, not the model's own tensors. "
            "Build it from the argument of the function, not from model.parameters()."
        )
    return optimizer


def _is_decoupled(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))
