"""Any operation without a rule of its own: redone for one example at a time in the backward pass.

Slow, and right for every differentiable operation whose output rows are its input rows' examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from lowkey.errors import UnsupportedLayerError
from lowkey.factors.capture import Site
from lowkey.factors.registry import MARK, Call, anything, rule


class _ByExample(torch.autograd.Function):
    """Run an operation as it is; in the backward pass, rerun it on each row."""

    @staticmethod
    def forward(ctx: Any, replay: _Replay, anchor: Tensor, *tensors: Tensor) -> Tensor:
        output = replay.run(tensors)
        ctx.replay = replay
        ctx.save_for_backward(*tensors, output, MARK)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, backprops: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override] # reason: torch types it with *args
        *tensors, output, _ = ctx.saved_tensors
        gradients = ctx.replay.gradients(tensors, output, backprops)
        inputs: list[Tensor | None] = [None] * len(gradients)
        for i, gradient in enumerate(gradients):
            site = ctx.replay.sites[i]
            if site is not None:
                site.record_dense(gradient)
            elif ctx.needs_input_grad[i + 2]:
                inputs[i] = gradient
        return None, None, *inputs


class _Replay:
    """An operation with its tensor arguments taken out."""

    def __init__(self, call: Call) -> None:
        flat, self._spec = pytree.tree_flatten((call.args, dict(call.kwargs)))
        self._flat: list[Any] = [None if isinstance(value, Tensor) else value for value in flat]
        self._places = [i for i, value in enumerate(flat) if isinstance(value, Tensor)]
        self._function = call.function
        self.tensors = [flat[i] for i in self._places]
        self.sites: list[Site | None] = [call.capture.site(tensor) for tensor in self.tensors]
        self._is_data = [call.capture.is_data(tensor) for tensor in self.tensors]
        self._device = self.tensors[0].device.type
        self._autocast_dtype = torch.get_autocast_dtype(self._device) if torch.is_autocast_enabled(self._device) else None

    def run(self, tensors: Sequence[Tensor]) -> Tensor:
        flat = list(self._flat)
        for place, tensor in zip(self._places, tensors, strict=True):
            flat[place] = tensor
        args, kwargs = pytree.tree_unflatten(flat, self._spec)
        return self._function(*args, **kwargs)

    def num_rows(self) -> int | None:
        """Return how many rows all data arguments have, or None if they do not agree."""
        sizes = {tensor.shape[0] if tensor.dim() else None for tensor, data in zip(self.tensors, self._is_data, strict=True) if data}
        return sizes.pop() if len(sizes) == 1 else None

    def gradients(self, tensors: Sequence[Tensor], output: Tensor, backprops: Tensor) -> list[Tensor]:
        """Return for each tensor argument its gradient, with a row per row of the batch."""
        rows: list[list[Tensor]] = []
        distances: list[Tensor] = []
        for b in range(backprops.shape[0]):
            alone, gradients = self._row(tensors, backprops, b)
            distances.append(_distance(alone.detach(), output[b : b + 1]))
            rows.append(gradients)
        # PRIVACY: only an operation that gives an example the same row alone as in its batch has a gradient per example.
        if bool((torch.stack(distances) > _TOLERANCE).any()):
            self._refuse("gives an example another result alone than in its batch, so it mixes examples or draws random numbers")
        return [
            torch.cat(parts) if data else torch.stack(parts) for data, parts in zip(self._is_data, zip(*rows, strict=True), strict=True)
        ]

    def _row(self, tensors: Sequence[Tensor], backprops: Tensor, b: int) -> tuple[Tensor, list[Tensor]]:
        """Return the operation's output for row `b` alone, and the gradients of its arguments."""
        dtype = self._autocast_dtype
        with torch.enable_grad(), torch.autocast(self._device, dtype, enabled=dtype is not None, cache_enabled=False):
            leaves = [
                (tensor[b : b + 1] if data else tensor).detach().requires_grad_(tensor.is_floating_point())
                for tensor, data in zip(tensors, self._is_data, strict=True)
            ]
            output = self.run(leaves)
        if output.shape != backprops[b : b + 1].shape:
            self._refuse(f"gives {tuple(output.shape)} for one example and {tuple(backprops.shape)} for {len(backprops)}")
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(output, wanted, backprops[b : b + 1], allow_unused=True))
        gradients = [next(found) if leaf.requires_grad else None for leaf in leaves]
        return output, [torch.zeros_like(leaf) if gradient is None else gradient for gradient, leaf in zip(gradients, leaves, strict=True)]

    @property
    def labels(self) -> str:
        return ", ".join(repr(site.label) for site in self.sites if site is not None)

    @property
    def name(self) -> str:
        return getattr(self._function, "__name__", str(self._function))

    def _refuse(self, finding: str) -> NoReturn:
        raise UnsupportedLayerError(
            f"{self.labels} took part in {self.name}, which {finding}, so no per-example gradient is known. "
            "Each example's result must depend on that example alone. "
            "Rewrite the operation so, or freeze the parameter with requires_grad_(False)."
        )


_TOLERANCE = 0.05
"""How far a row alone may be from the same row in its batch: bfloat16 products differ by a percent, a coupling by more."""


def _distance(alone: Tensor, together: Tensor) -> Tensor:
    # NUMERICS: an example that is not a number passes, for NaN is above no tolerance; it is dropped when the sum is clipped.
    if not alone.numel():
        return alone.new_zeros(())
    return (alone - together).abs().amax() / together.abs().amax().clamp_min(1e-30)


@rule(anything)
def by_example(call: Call) -> Tensor:
    """Catch an operation that has no rule."""
    replay = _Replay(call)
    num_rows = replay.num_rows()
    if num_rows is None:
        raise UnsupportedLayerError(
            f"{replay.labels} met data in {replay.name}, whose arguments do not share a batch axis, so no per-example gradient is known. "
            "Every data argument needs the examples on its first axis. "
            "Rewrite the operation so, or freeze the parameter with requires_grad_(False)."
        )
    output = _ByExample.apply(
        replay, call.capture.anchor, *[_plain(tensor, site) for tensor, site in zip(replay.tensors, replay.sites, strict=True)]
    )
    if not isinstance(output, Tensor) or output.dim() == 0 or output.shape[0] != num_rows:
        raise UnsupportedLayerError(
            f"{replay.labels} took part in {replay.name}, whose result does not have one row per example, "
            "so no per-example gradient is known. "
            "A layer must keep the examples on the first axis. "
            "Rewrite the operation so, or freeze the parameter with requires_grad_(False)."
        )
    return output


def _plain(tensor: Tensor, site: Site | None) -> Tensor:
    return tensor if site is None else tensor.detach()


def shared(call: Call, operand: Tensor) -> Tensor:
    """Return an operand that every example meets, without its graph: a weight's gradient goes to its site, and a constant has none.

    Raises:
        UnsupportedLayerError: It is data that passes a gradient on, to examples that nobody could tell apart.
    """
    if operand.requires_grad and call.capture.is_data(operand):
        # PRIVACY: without its graph, examples that it mixes would go unnoticed, and what made it would go untrained.
        raise UnsupportedLayerError(
            f"{call.function.__name__} was given a weight or bias of shape {tuple(operand.shape)} that was computed from the batch, "
            "or from parameters outside the forward pass of the model. "
            "All examples of the batch share it, so no per-example gradient is known. "
            "Compute it from parameters alone, inside a module's forward."
        )
    return operand.detach()
