"""What a layer keeps of its input until the backward pass.

    the product with the sketch's basis    where the sketch reduces the input; layers that share both share the product
    what the activation before it keeps    where that is the activation's own input, from which the output is had again
    the input itself                       otherwise

Autograd refuses the backward pass if what was kept has been written to since.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowkey.errors import UnsupportedLayerError
from lowkey.factors.registry import Operation

ACTIVATIONS = {F.gelu, F.silu, F.mish, F.hardswish, F.elu, F.leaky_relu}
"""Functions of each number by itself that keep their input for the backward pass, and nothing of their output."""


_WHOLE, _SOURCE = torch.zeros(()), torch.ones(())
"""Say of a saved tensor which of the two it is."""


@dataclass(frozen=True)
class Kept:
    """What is left of a layer's input.

    Fields:
        tensor: The input or its product with a basis; or with `activation`, what makes the input.
        activation: What the tensor has yet to go through.
    """

    tensor: Tensor
    activation: Callable[[Tensor], Tensor] | None = None

    @property
    def saved(self) -> tuple[Tensor, Tensor]:
        """What a layer saves for its backward pass."""
        # A checkpoint runs the forward pass again, where the activation may go unseen, and hands over what that run has saved.
        return self.tensor, _WHOLE if self.activation is None else _SOURCE


def restore(saved: Sequence[Tensor], activation: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Make what the sketch is given of what was saved."""
    tensor, kind = saved
    if not kind:
        return tensor
    if activation is None:
        raise UnsupportedLayerError(
            "a checkpoint ran a layer again behind an activation that was not there, or not seen, when it ran first. "
            "Both runs must be the same, or the layer's gradient is wrong. Checkpoint a whole module of the model."
        )
    return activation(tensor)


@dataclass(frozen=True)
class _Noted:
    """What may be kept in place of a tensor that belongs to another one, as long as nothing is written into either."""

    tensor: weakref.ref[Tensor]
    other: Tensor
    versions: tuple[int, ...]
    kept: Kept

    @classmethod
    def of(cls, tensor: Tensor, other: Tensor, kept: Kept) -> _Noted:
        return cls(weakref.ref(tensor), other, _versions(tensor, other), kept)

    def holds_for(self, tensor: Tensor) -> bool:
        return self.tensor() is tensor and self.versions == _versions(tensor, self.other)


def _versions(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in tensors)


class Inputs:
    """Chooses what is kept, and remembers the last product and the last activation of a forward pass."""

    def __init__(self) -> None:
        self._product: _Noted | None = None
        self._activation: _Noted | None = None

    def keep(self, inputs: Tensor, basis: Tensor | None) -> Kept:
        """Return the least that stands for `inputs`, of which the sketch wants the product with `basis`, or with None the whole."""
        if basis is None:
            last = self._activation
            return last.kept if last is not None and last.holds_for(inputs) else Kept(inputs.detach())
        last = self._product
        if last is None or not last.holds_for(inputs) or last.other is not basis:
            with torch.no_grad():
                last = _Noted.of(inputs, basis, Kept(inputs.detach() @ basis.to(inputs.dtype)))
            self._product = last
        return last.kept

    def note(self, function: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Tensor) -> None:
        """Remember an activation that has just been computed."""
        # One that passes no gradient on keeps nothing, and one that works in place has no input left.
        if not args or not output.requires_grad or output is args[0]:
            return
        # The way back holds no tensor: the input must be free to go when the backward pass has used it.
        source, options = args[0].detach(), args[1:]
        self._activation = _Noted.of(output, source, Kept(source, lambda tensor: function(tensor, *options, **kwargs)))

    def forget(self) -> None:
        """Let go of both."""
        self._product = self._activation = None
