"""Slots: for each parameter, the tensors that the optimizer steps.

A slot is the weight itself, or a proxy for a block of its subspace; what the optimizer leaves in proxies is carried to the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowkey.boundary import Released
from lowkey.checks import Word
from lowkey.errors import ConfigError
from lowkey.optim.subspace import Subspace
from lowkey.sketch import Sketch

OptimizerFactory = Callable[[Any], torch.optim.Optimizer]
"""Called with the tensors to step, or with parameter groups; returns a torch optimizer."""

GroupOptions = Callable[[str], Mapping[str, Any]]
"""Optimizer options of a parameter, by its name."""


class OnRefresh(Word):
    """What becomes of the optimizer's moments when a basis is redrawn."""

    KEEP = "keep"
    ROTATE = "rotate"
    RESET = "reset"


class Slots:
    """Steps a model's parameters from released coordinates.

    Args:
        parameters: The weights, by name.
        sketches: How each parameter's coordinates are decoded.
        subspaces: The coordinates that are stepped in place of some of the weights.
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
        self._slots: dict[str, nn.Parameter] = {}
        self._blocks: dict[str, tuple[str, ...]] = {}
        for name, parameter in parameters.items():
            made = _make_slots(name, parameter, subspaces.get(name))
            self._slots.update(made)
            self._blocks[name] = tuple(made)
        owners = {block: name for name, blocks in self._blocks.items() for block in blocks}
        self.optimizer = _build(optimizer, self._slots, owners, groups)
        self._owners = {id(self._slots[block]): name for block, name in owners.items()}

    def step(self, released: Released) -> None:
        """Let the optimizer take one step along the released gradient, and carry it to the weights."""
        for name, blocks in self._blocks.items():
            gradients = released.blocks if name in self._subspaces else {name: self._sketches[name].decode(released.blocks)}
            for block in blocks:
                slot = self._slots[block]
                slot.grad = gradients[block].to(slot.dtype).reshape(slot.shape)
        try:
            self._decay()
            self.optimizer.step()
        finally:
            # Left behind by a step that was interrupted, they would look like raw gradients to the next backward pass.
            for slot in self._slots.values():
                slot.grad = None
        with torch.no_grad():
            for name, subspace in self._subspaces.items():
                proxies = self._proxies(name)
                subspace.move(self._parameters[name], proxies)
                for proxy in proxies.values() if subspace.is_centred else ():
                    proxy.zero_()

    def _proxies(self, name: str) -> dict[str, nn.Parameter]:
        return {block: self._slots[block] for block in self._blocks[name]}

    def _decay(self) -> None:
        """Apply weight decay to the real weights; the optimizer sees centred proxies at zero, which do not decay."""
        for group in self.optimizer.param_groups:
            decay = group.get("weight_decay", 0.0)
            owners = dict.fromkeys(self._owners[id(slot)] for slot in group["params"])
            for name in owners if decay else ():
                if name in self._subspaces and self._subspaces[name].is_centred:
                    self._decay_one(name, group, decay)

    @torch.no_grad()
    def _decay_one(self, name: str, group: Mapping[str, Any], decay: float) -> None:
        weight = self._parameters[name]
        if _is_decoupled(self.optimizer, group):
            weight.mul_(1 - group["lr"] * decay)
            return
        for block, coordinates in self._subspaces[name].encode(weight.detach()).items():
            gradient = self._slots[block].grad
            if gradient is not None:
                gradient.add_(coordinates, alpha=-decay if group.get("maximize") else decay)

    def follow(self, sketches: Mapping[str, Sketch], subspaces: Mapping[str, Subspace], policy: OnRefresh) -> None:
        """Go on in other bases where they have changed, and carry the optimizer's moments over as `policy` says."""
        for name, later in subspaces.items():
            earlier = self._subspaces[name]
            if later is earlier:
                continue
            starts = {} if later.is_centred else later.start()
            for block, slot in self._proxies(name).items():
                self._carry(block, earlier, later, policy)
                if block in starts:
                    slot.data.copy_(starts[block])
        self._sketches, self._subspaces = dict(sketches), dict(subspaces)

    def _carry(self, block: str, earlier: Subspace, later: Subspace, policy: OnRefresh) -> None:
        slot = self._slots[block]
        state: dict[str, Any] = self.optimizer.state.get(slot, {})
        moments = {key: value for key, value in state.items() if isinstance(value, Tensor) and value.shape == slot.shape}
        if policy is OnRefresh.RESET:
            for value in moments.values():
                value.zero_()
            # NUMERICS: Adam makes up for moments that begin at zero by its count of steps; with the old count, steps would be too long.
            if isinstance(state.get("step"), Tensor):
                state["step"].zero_()
        elif policy is OnRefresh.ROTATE:
            for key in moments.keys() & _SIGNED_MOMENTS:
                rotated = earlier.rotate_to(later, block, moments[key])
                if rotated is not None:
                    moments[key].copy_(rotated)


_SIGNED_MOMENTS = {"exp_avg", "momentum_buffer"}
"""State entries that transform like a gradient; squares do not rotate."""


_WANTED = (
    "It must be a function that takes tensors and returns a torch optimizer, for with a sketch these are not the model's own. "
    "Pass functools.partial(torch.optim.AdamW, lr=1e-3)."
)


def _make_slots(name: str, parameter: nn.Parameter, subspace: Subspace | None) -> dict[str, nn.Parameter]:
    if subspace is None:
        return {name: parameter}
    return {block: nn.Parameter(value.detach().clone().to(parameter)) for block, value in subspace.start().items()}


def _build(
    factory: OptimizerFactory, slots: Mapping[str, nn.Parameter], owners: Mapping[str, str], groups: GroupOptions | None
) -> torch.optim.Optimizer:
    tensors: Sequence[Any] = list(slots.values())
    if groups is not None:
        tensors = [{"params": [slot], **groups(owners[block])} for block, slot in slots.items()]
    if not callable(factory):
        raise ConfigError(f"optimizer is a {type(factory).__name__}. {_WANTED}")
    optimizer = factory(tensors)
    if not isinstance(optimizer, torch.optim.Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance] # reason: users pass what they like
        raise ConfigError(f"optimizer made a {type(optimizer).__name__}. {_WANTED}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "LBFGS evaluates the loss several times in a step, and each one would be a release. A step is one release. Use SGD or Adam."
        )
    stepped = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    missing = [block for block, slot in slots.items() if id(slot) not in stepped]
    if missing or len(stepped) != len(slots):
        raise ConfigError(
            f"the optimizer does not step exactly the {len(slots)} tensors that it was called with "
            f"({len(missing)} are missing, {len(stepped) - len(slots) + len(missing)} are others). "
            "With a sketch the optimizer steps proxies, not the model's own tensors. "
            "Build it from the argument of the function, not from model.parameters()."
        )
    return optimizer


def _is_decoupled(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))
