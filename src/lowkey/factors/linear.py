"""Linear layers: `F.linear`, `torch.addmm` (Hugging Face's Conv1D), and a matrix product with a weight on either side.

Axes: B examples, ... positions, I inputs, O outputs
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lowkey.factors.capture import Site
from lowkey.factors.collector import Axis
from lowkey.factors.elementwise import ROW_REPLAYS, sum_positions
from lowkey.factors.fallback import by_example, shared
from lowkey.factors.inputs import Kept, restore
from lowkey.factors.registry import MARK, Call, rule


class _Product(torch.autograd.Function):
    """`inputs @ weight^T + bias`, keeping of `inputs` only what the sketch of the weight needs."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kept: Kept | None,
        anchor: Tensor,
        sites: tuple[Site | None, Site | None],
    ) -> Tensor:
        ctx.sites = sites
        ctx.activation = None if kept is None else kept.activation
        ctx.save_for_backward(weight, MARK, *(() if kept is None else kept.saved))
        return F.linear(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, backprops: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override] # reason: torch types it with *args
        weight, _, *kept = ctx.saved_tensors
        weight_site, bias_site = ctx.sites
        # Attention hands back gradients in the layout of its heads; one copy here saves one in every product below.
        backprops = backprops.contiguous()
        if weight_site is not None:
            weight_site.record_outer(rows=backprops, cols=restore(kept, ctx.activation), kept=Axis.COLS)
        if bias_site is not None:
            bias_site.record_dense(sum_positions(backprops))
        gradient = backprops @ weight.to(backprops.dtype) if ctx.needs_input_grad[0] else None
        return gradient, None, None, None, None, None


@rule(F.linear)
def linear(call: Call) -> Tensor:
    """`F.linear(input, weight, bias=None)`."""
    inputs, weight, bias = _bind_linear(*call.args, **call.kwargs)
    if call.capture.is_weight(inputs) or not (call.capture.is_weight(weight) or call.capture.is_weight(bias)):
        return by_example(call)
    return _apply(call, inputs, weight, bias)


ROW_REPLAYS.add(linear)


def _bind_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


def _apply(call: Call, inputs: Tensor, weight: Tensor, bias: Tensor | None, turn: bool = False) -> Tensor:
    """Run `inputs @ weight^T + bias` (with `turn`: `inputs @ weight + bias`)."""
    site = call.capture.site(weight)
    if site is not None and turn:
        site = Site(site.collector, site.target, not site.transposed)
    bias_site = None if bias is None else call.capture.site(bias)
    kept = None if site is None else site.keep(inputs, Axis.COLS)
    matrix = shared(call, weight)
    plain_bias = None if bias is None else shared(call, bias)
    return _Product.apply(inputs, matrix.T if turn else matrix, plain_bias, kept, call.capture.anchor, (site, bias_site))


@rule(torch.addmm, Tensor.addmm)
def addmm(call: Call) -> Tensor:
    """`addmm(bias, inputs, weight)`: a linear layer whose weight is stored input-first."""
    bias, inputs, weight = call.args[:3]
    if call.kwargs or len(call.args) > 3 or bias.dim() != 1 or not call.capture.is_data(inputs) or call.capture.is_data(weight):
        return by_example(call)
    return _apply(call, inputs, weight, bias, turn=True)


@rule(torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.mm, Tensor.mm)
def matmul(call: Call) -> Tensor:
    """`inputs @ weight` for a matrix `weight`."""
    left, right = call.args if call.function is not Tensor.__rmatmul__ else reversed(call.args)
    if call.kwargs or right.dim() != 2 or left.dim() < 2 or not call.capture.is_data(left) or call.capture.is_data(right):
        return by_example(call)
    return _apply(call, left, right, None, turn=True)
