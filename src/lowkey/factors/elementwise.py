"""Weights used by broadcasting: biases, scales, class tokens, position embeddings.

The weight is replaced by a zero-storage copy per example, whose gradient torch's own broadcasting rule then gives per example.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lowkey.errors import ShapeError
from lowkey.factors.capture import Capture, Recipe, Site
from lowkey.factors.fallback import by_example
from lowkey.factors.registry import RULES, Call, rule


class _Copies(torch.autograd.Function):
    """One copy of a weight for each row of the batch, without storage."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, anchor: Tensor, num_rows: int, num_dims: int, site: Site) -> Tensor:
        ctx.site = site
        ctx.shape = weight.shape
        inner = list(weight.shape) if weight.dim() < num_dims else list(weight.shape[1:])
        padding = [1] * (num_dims - 1 - len(inner))
        return weight.reshape(1, *padding, *inner).expand(num_rows, *padding, *inner)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, backprops: Tensor) -> tuple[None, ...]:  # type: ignore[override] # reason: torch types it with *args
        ctx.site.record_dense(backprops.reshape(backprops.shape[0], *ctx.shape))
        return None, None, None, None, None


class _OwnRow(torch.autograd.Function):
    """A weight whose row b meets row b of the batch and no other: example b's gradient is zero in all other rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, anchor: Tensor, site: Site) -> Tensor:
        ctx.site = site
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, backprops: Tensor) -> tuple[None, ...]:  # type: ignore[override] # reason: torch types it with *args
        rows = backprops.shape[0]
        gradients = backprops.new_zeros(rows, *backprops.shape)
        gradients[range(rows), range(rows)] = backprops
        ctx.site.record_dense(gradients)
        return None, None, None


def sum_positions(values: Tensor) -> Tensor:
    """Sum `(rows, ..., F)` over everything between the first and the last axis."""
    return values.flatten(1, -2).sum(1) if values.dim() > 2 else values


def per_example(capture: Capture, weight: Tensor, num_rows: int, num_dims: int) -> Tensor | None:
    """Return `weight` as data that broadcasts like it against `(num_rows, ...)` of `num_dims` axes, or None if it cannot."""
    site = capture.site(weight)
    if site is None or weight.dim() > num_dims:
        return None
    if weight.dim() < num_dims or weight.shape[0] == 1:
        return _Copies.apply(weight.detach(), capture.anchor, num_rows, num_dims, site)
    if weight.shape[0] != num_rows:
        return None
    rows = by_row(capture, weight)
    return _OwnRow.apply(weight.detach(), capture.anchor, site) if rows is None else rows


def as_data(capture: Capture, tensor: Tensor, num_rows: int) -> Tensor:
    """Return `tensor`, whose rows are the examples', as data, also where it was computed from weights or constants alone."""
    if not capture.is_weight(tensor):
        return tensor.view_as(tensor)
    rows = per_example(capture, tensor, num_rows, tensor.dim())
    if rows is None:
        site = capture.site(tensor)
        label = "a weight" if site is None else repr(site.label)
        raise ShapeError(
            f"an input computed from {label} has shape {tuple(tensor.shape)} in a batch of {num_rows}. "
            "It must have one row per example. Expand it to the batch first."
        )
    return rows


def by_row(capture: Capture, weight: Tensor) -> Tensor | None:
    """Redo a derived weight, whose first axis is the batch's, so that each row belongs to its example."""
    recipe = capture.recipe(weight)
    if recipe is None:
        return None
    inner = capture.recipe(recipe.args[0]) if recipe.function is Tensor.transpose else None
    if inner is not None and inner.function is Tensor.transpose and set(inner.args[1:]) == set(recipe.args[1:]):
        return per_example(capture, inner.args[0], weight.shape[0], weight.dim())
    if recipe.function in (Tensor.expand, Tensor.expand_as, Tensor.repeat, torch.broadcast_to, Tensor.broadcast_to):
        return _expand_by_row(capture, weight, recipe)
    handler = RULES.get(recipe.function)
    if handler is not None and handler in ROW_REPLAYS and _has_rows(capture, recipe.args[0], weight.shape[0]):
        return handler(Call(capture, recipe.function, recipe.args, recipe.kwargs))
    return _redo(capture, weight, recipe)


def _has_rows(capture: Capture, inputs: Any, num_rows: int) -> bool:
    return isinstance(inputs, Tensor) and not capture.is_weight(inputs) and inputs.dim() > 0 and inputs.shape[0] == num_rows


ROW_REPLAYS: set[Any] = set()
"""Rules that give the right answer for a constant input whose rows are the examples'."""


def _expand_by_row(capture: Capture, weight: Tensor, recipe: Recipe) -> Tensor | None:
    source = recipe.args[0]
    if source.dim() == weight.dim() and source.shape[0] != 1:
        return None
    if recipe.function is Tensor.repeat and tuple(source.shape[1:] if source.dim() == weight.dim() else source.shape) != tuple(
        weight.shape[1:]
    ):
        return None
    rows = per_example(capture, source, weight.shape[0], weight.dim())
    return None if rows is None else rows.expand(weight.shape)


def _redo(capture: Capture, weight: Tensor, recipe: Recipe) -> Tensor | None:
    """Repeat an operation on the rows of its arguments, if it keeps rows apart."""
    if recipe.function not in BROADCASTING and recipe.function not in _ROWWISE:
        return None
    rows = [_as_rows(capture, value, weight) for value in recipe.args]
    if any(row is None for row in rows):
        return None
    return recipe.function(*rows, **recipe.kwargs)


def _as_rows(capture: Capture, value: Any, weight: Tensor) -> Any:
    if not capture.is_weight(value):
        return value
    return per_example(capture, value, weight.shape[0], weight.dim())


_ROWWISE = {
    Tensor.to,
    Tensor.float,
    Tensor.double,
    Tensor.half,
    Tensor.bfloat16,
    Tensor.type_as,
    Tensor.contiguous,
    Tensor.clone,
    torch.relu,
    torch.tanh,
}

BROADCASTING = {
    torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__,
    torch.sub, Tensor.sub, Tensor.__sub__, Tensor.__rsub__, Tensor.sub_, Tensor.__isub__, torch.subtract, torch.rsub,
    torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.mul_, Tensor.__imul__, torch.multiply,
    torch.div, Tensor.div, Tensor.__truediv__, Tensor.__rtruediv__, Tensor.div_, Tensor.__itruediv__, torch.true_divide,
    torch.pow, Tensor.pow, Tensor.__pow__, Tensor.__rpow__,
    torch.maximum, Tensor.maximum, torch.minimum, Tensor.minimum, torch.where, Tensor.where,
    torch.addcmul, Tensor.addcmul, torch.addcdiv, torch.lerp, Tensor.lerp, Tensor.masked_fill, Tensor.type_as,
}  # fmt: skip


def _broadcast(call: Call) -> Any:
    """Any operation that broadcasts its tensor arguments against each other."""
    capture = call.capture
    tensors = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, Tensor)]
    num_dims = max(tensor.dim() for tensor in tensors)
    rows = next((tensor.shape[0] for tensor in tensors if capture.is_data(tensor) and tensor.dim() == num_dims), None)
    if rows is None:
        return by_example(call)

    def swap(value: Any) -> Any:
        return per_example(capture, value, rows, num_dims) if capture.is_weight(value) else value

    args = [swap(value) for value in call.args]
    kwargs: Mapping[str, Any] = {key: swap(value) for key, value in call.kwargs.items()}
    if any(
        new is None and old is not None for new, old in zip((*args, *kwargs.values()), (*call.args, *call.kwargs.values()), strict=True)
    ):
        return by_example(call)
    return call.function(*args, **kwargs)


for _function in BROADCASTING:
    rule(_function)(_broadcast)


@rule(torch.cat, torch.concat, torch.concatenate)
def cat(call: Call) -> Any:
    """Class and prompt tokens, expanded to the batch and put before its positions."""
    capture = call.capture
    tensors = list(call.args[0] if call.args else call.kwargs["tensors"])
    dim = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else 0)
    if dim % tensors[0].dim() == 0:
        return by_example(call)
    num_rows = next(tensor.shape[0] for tensor in tensors if capture.is_data(tensor))
    rows = [per_example(capture, tensor, num_rows, tensor.dim()) if capture.is_weight(tensor) else tensor for tensor in tensors]
    if any(row is None for row in rows):
        return by_example(call)
    return call.function(rows, dim=dim)
