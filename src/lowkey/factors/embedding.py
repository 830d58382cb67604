"""Embeddings: a matrix product with the one-hot matrix of the indices, which is never built.

Axes: B examples, T positions, V vocabulary, F features
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lowkey.errors import UnsupportedLayerError
from lowkey.factors.capture import Site
from lowkey.factors.elementwise import ROW_REPLAYS
from lowkey.factors.factor import OneHot
from lowkey.factors.fallback import by_example
from lowkey.factors.registry import Call, guard, rule


class _Lookup(torch.autograd.Function):
    """Rows of a table, each occurrence a position of its example."""

    @staticmethod
    def forward(ctx: Any, index: Tensor, table: Tensor, anchor: Tensor, padding_index: int | None, site: Site) -> Tensor:
        ctx.site, ctx.padding_index, ctx.size = site, padding_index, table.shape[0]
        ctx.save_for_backward(index)
        return F.embedding(index, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, backprops: Tensor) -> tuple[None, ...]:  # type: ignore[override] # reason: torch types it with *args
        (index,) = ctx.saved_tensors
        if ctx.padding_index is not None:
            backprops = backprops.masked_fill((index == ctx.padding_index)[..., None], 0.0)
        if index.dim() == 1:
            index, backprops = index[:, None], backprops[:, None]
        ctx.site.record_outer(rows=OneHot(index.flatten(1), ctx.size), cols=backprops.flatten(1, -2))
        return None, None, None, None, None


@rule(F.embedding)
def embedding(call: Call) -> Tensor:
    """`F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)`."""
    return _lookup(call, *call.args, **call.kwargs)


def _lookup(
    call: Call,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    site = call.capture.site(weight)
    if site is None or call.capture.is_weight(input):
        return by_example(call)
    if max_norm is not None or scale_grad_by_freq:
        reason = f"max_norm={max_norm}" if max_norm is not None else "scale_grad_by_freq=True"
        raise UnsupportedLayerError(
            f"the embedding '{site.label}' has {reason}, which depends on the whole batch, so no per-example gradient exists. "
            "Each example's gradient must depend on that example alone. Set max_norm=None and scale_grad_by_freq=False."
        )
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    return _Lookup.apply(input, weight.detach(), call.capture.anchor, padding_idx, site)


@rule(Tensor.__getitem__)
def index_rows(call: Call) -> Tensor:
    """`weight[index]` with an integer tensor of examples."""
    weight, index = call.args
    if (
        not isinstance(index, Tensor)
        or index.dtype not in (torch.int64, torch.int32)
        or weight.dim() != 2
        or not call.capture.is_weight(weight)
    ):
        return by_example(call)
    return _lookup(call, torch.where(index < 0, index + weight.shape[0], index), weight)


ROW_REPLAYS.add(embedding)


@guard(F.embedding)
def refuse_renormalisation(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    *_: object,
    **__: object,
) -> None:
    """Refuse a table that a batch rescales in place, trained or frozen."""
    if max_norm is not None:
        raise UnsupportedLayerError(
            f"an embedding has max_norm={max_norm}, which rescales the rows that the batch looks up, and so publishes which they are. "
            "A table may change by releases alone. Set max_norm=None."
        )
