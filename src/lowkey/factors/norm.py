"""Normalisation layers: statistics of one example, then a scale and a shift.

Axes: B examples, ... positions, C channels
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lowkey.errors import UnsupportedLayerError
from lowkey.factors.capture import Site
from lowkey.factors.elementwise import per_example
from lowkey.factors.factor import widen
from lowkey.factors.fallback import by_example, shared
from lowkey.factors.registry import MARK, Call, guard, rule

_Sites = tuple[Site | None, Site | None]

_IN_CACHE = 1 << 18
"""Numbers that a core's own cache holds."""


class _LayerNorm(torch.autograd.Function):
    """Layer norm that keeps its input alone, as torch's own does."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor | None, bias: Tensor | None, anchor: Tensor, shape: list[int], eps: float, sites: _Sites
    ) -> Tensor:
        output, mean, rstd = torch.native_layer_norm(inputs, shape, weight, bias, eps)
        ctx.shape, ctx.sites = shape, sites
        ctx.save_for_backward(inputs, mean, rstd, weight, bias, MARK)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, backprops: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override] # reason: torch types it with *args
        inputs, mean, rstd, weight, bias, _ = ctx.saved_tensors
        weight_site, bias_site = ctx.sites
        if weight_site is not None or bias_site is not None:
            scale, shift = _layer_norm_sums(backprops, inputs, mean, rstd, ctx.shape)
            if weight_site is not None:
                weight_site.record_dense(scale)
            if bias_site is not None:
                bias_site.record_dense(shift)
        gradient = None
        if ctx.needs_input_grad[0]:
            gradient = torch.ops.aten.native_layer_norm_backward(
                backprops, inputs, ctx.shape, mean, rstd, weight, bias, [True, False, False]
            )[0]
        return gradient, None, None, None, None, None, None


def _layer_norm_sums(backprops: Tensor, inputs: Tensor, mean: Tensor, rstd: Tensor, shape: list[int]) -> tuple[Tensor, Tensor]:
    """Return each row's `sum_t backprops_t (inputs_t - mean_t) rstd_t` and `sum_t backprops_t`."""
    rows, width = len(inputs), math.prod(shape)
    backprops, inputs = (widen(side).reshape(rows, -1, width) for side in (backprops, inputs))
    mean, rstd = (widen(side).to(inputs.dtype).reshape(rows, 1, -1) for side in (mean, rstd))
    # As matrix products these are one pass over memory each.
    centre, shift = (torch.cat([mean * rstd, torch.ones_like(rstd)], 1) @ backprops).unbind(1)
    # The elementwise product stays in the cache, and takes no memory of the size of the layer.
    few = rows if inputs.is_cuda else max(1, _IN_CACHE // max(1, inputs[0].numel()))
    parts = [r @ (d * x) for r, d, x in zip(rstd.split(few), backprops.split(few), inputs.split(few), strict=True)]
    scale = torch.cat(parts).squeeze(1) - centre
    return scale.reshape(rows, *shape), shift.reshape(rows, *shape)


class _GroupNorm(torch.autograd.Function):
    """Group norm that keeps its input alone, as torch's own does."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor | None, bias: Tensor | None, anchor: Tensor, groups: int, eps: float, sites: _Sites
    ) -> Tensor:
        ctx.sizes = (inputs.shape[0], inputs.shape[1], inputs.shape[2:].numel(), groups)
        output, mean, rstd = torch.native_group_norm(inputs, weight, bias, *ctx.sizes, eps)
        ctx.sites = sites
        ctx.save_for_backward(inputs, mean, rstd, weight, MARK)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, backprops: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override] # reason: torch types it with *args
        inputs, mean, rstd, weight, _ = ctx.saved_tensors
        weight_site, bias_site = ctx.sites
        batch, channels, size, groups = ctx.sizes
        # With every channel of every example a channel of its own, torch's sums over the batch are sums over one example.
        wide = [widen(tensor).reshape(1, batch * channels, size) for tensor in (backprops, inputs)]
        statistics = [widen(tensor).reshape(1, batch * groups) for tensor in (mean, rstd)]
        scales = None if weight is None else widen(weight).repeat(batch)
        wanted = [ctx.needs_input_grad[0], weight_site is not None, bias_site is not None]
        gradient, scale, shift = torch.ops.aten.native_group_norm_backward(
            *wide, *statistics, scales, 1, batch * channels, size, batch * groups, wanted
        )
        if weight_site is not None:
            weight_site.record_dense(scale.view(batch, channels))
        if bias_site is not None:
            bias_site.record_dense(shift.view(batch, channels))
        gradient = gradient.view_as(inputs).to(inputs.dtype) if wanted[0] else None
        return gradient, None, None, None, None, None, None


def _sites(call: Call, weight: Tensor | None, bias: Tensor | None) -> _Sites:
    return None if weight is None else call.capture.site(weight), None if bias is None else call.capture.site(bias)


def _full_precision(inputs: Tensor) -> Tensor:
    return inputs.float() if torch.is_autocast_enabled(inputs.device.type) else inputs


def _plain(call: Call, tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else shared(call, tensor)


@rule(F.layer_norm, torch.layer_norm)
def layer_norm(call: Call) -> Tensor:
    """`F.layer_norm(input, normalized_shape, weight, bias, eps)`."""
    return _layer_norm(call, *call.args, **call.kwargs)


def _layer_norm(
    call: Call,
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    if not call.capture.is_data(input):
        return by_example(call)
    operands = (_full_precision(input), _plain(call, weight), _plain(call, bias))
    return _LayerNorm.apply(*operands, call.capture.anchor, list(normalized_shape), eps, _sites(call, weight, bias))


@rule(F.group_norm, torch.group_norm)
def group_norm(call: Call) -> Tensor:
    """`F.group_norm(input, num_groups, weight, bias, eps)`."""
    return _group_norm(call, *call.args, **call.kwargs)


def _group_norm(
    call: Call,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    if not call.capture.is_data(input):
        return by_example(call)
    operands = (_full_precision(input).contiguous(), _plain(call, weight), _plain(call, bias))
    return _GroupNorm.apply(*operands, call.capture.anchor, num_groups, eps, _sites(call, weight, bias))


@rule(F.rms_norm, torch.rms_norm)
def rms_norm(call: Call) -> Tensor:
    """`F.rms_norm(input, normalized_shape, weight, eps)`."""
    return _rms_norm(call, *call.args, **call.kwargs)


def _rms_norm(call: Call, input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    if weight is None or not call.capture.is_data(input):
        return by_example(call)
    scale = per_example(call.capture, weight, input.shape[0], input.dim())
    if scale is None:
        return by_example(call)
    return F.rms_norm(input, normalized_shape, None, eps) * scale


@rule(F.instance_norm)
def instance_norm(call: Call) -> Tensor:
    """`F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)`."""
    return _per_channel(call, F.instance_norm, *call.args, **call.kwargs)


@rule(F.batch_norm)
def batch_norm(call: Call) -> Tensor:
    """`F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)` with frozen statistics."""
    return _per_channel(call, F.batch_norm, *call.args, **call.kwargs)


def _per_channel(
    call: Call,
    function: Any,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *flags: Any,
    **named: Any,
) -> Tensor:
    if not call.capture.is_data(input):
        return by_example(call)
    output = function(input, running_mean, running_var, None, None, *flags, **named)
    trailing = [1] * (input.dim() - 2)
    for tensor, apply in ((weight, torch.mul), (bias, torch.add)):
        if tensor is not None:
            rows = per_example(call.capture, tensor, input.shape[0], 2) if call.capture.is_weight(tensor) else tensor[None]
            if rows is None:
                return by_example(call)
            output = apply(output, rows.reshape(*rows.shape, *trailing))
    return output


@guard(F.batch_norm)
def refuse_batch_statistics(
    input: Tensor,
    running_mean: object,
    running_var: object,
    weight: object = None,
    bias: object = None,
    training: bool = False,
    *_: object,
    **__: object,
) -> None:
    """Refuse statistics over the batch."""
    if training:
        raise UnsupportedLayerError(
            "batch_norm ran in training mode, which mixes examples, so no per-example gradient exists. "
            "Each example's gradient must depend on that example alone. "
            "Replace the layer with GroupNorm, or freeze it: layer.eval() after every model.train()."
        )


@guard(F.instance_norm)
def refuse_running_statistics(
    input: Tensor,
    running_mean: object = None,
    running_var: object = None,
    weight: object = None,
    bias: object = None,
    use_input_stats: bool = True,
    *_: object,
    **__: object,
) -> None:
    """Refuse running statistics that a batch would update."""
    if use_input_stats and running_mean is not None:
        raise UnsupportedLayerError(
            "instance_norm updates running statistics from the batch, which would publish private data without noise. "
            "A buffer may hold no private data. Set track_running_stats=False, or call layer.eval()."
        )
