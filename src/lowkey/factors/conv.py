"""Convolutions in one, two and three dimensions.

The gradients themselves are in `lowkey.factors.kernels`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lowkey.factors.capture import Site
from lowkey.factors.collector import Axis
from lowkey.factors.elementwise import sum_positions
from lowkey.factors.factor import widen
from lowkey.factors.fallback import by_example, shared
from lowkey.factors.kernels import Convolution, Geometry, Reduction
from lowkey.factors.registry import MARK, Call, rule

_WORTHWHILE = 0.5
"""An input is reduced at once if that leaves less than this part of it; more often than not the layer before keeps it anyway."""


class _Convolution(torch.autograd.Function):
    """A convolution that keeps of its input only what the sketch of the kernel needs."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        kernel: Tensor,
        bias: Tensor | None,
        kept: Tensor | None,
        anchor: Tensor,
        geometry: Geometry,
        sites: tuple[Site | None, Site | None, Reduction | None],
    ) -> Tensor:
        ctx.geometry, ctx.sites, ctx.input_shape = geometry, sites, inputs.shape
        ctx.save_for_backward(kernel, kept, MARK)
        return geometry.run(inputs, kernel, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, backprops: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override] # reason: torch types it with *args
        kernel, kept, _ = ctx.saved_tensors
        site, bias_site, reduction = ctx.sites
        if site is not None:
            _record(site, backprops, kept, kernel, ctx.geometry, reduction)
        if bias_site is not None:
            bias_site.record_dense(sum_positions(widen(backprops).flatten(2).transpose(1, 2)))
        gradient = None
        if ctx.needs_input_grad[0]:
            # Only the shape of the input matters here; memory that nobody touches is not taken.
            unread = backprops.new_empty(ctx.input_shape)
            gradient = ctx.geometry.backward(backprops, unread, kernel.to(backprops.dtype), of_input=True)
        return gradient, None, None, None, None, None, None


def _record(site: Site, backprops: Tensor, kept: Tensor, kernel: Tensor, geometry: Geometry, reduction: Reduction | None) -> None:
    rows, axis = backprops.flatten(2).mT, None if reduction is None else Axis.COLS
    if reduction is not None and not reduction.is_pixelwise:
        site.record_outer(rows, kept.flatten(2).mT, kept=axis)
        return
    shape = (*kernel.shape[:1], kept.shape[1] // geometry.groups, *kernel.shape[2:])
    factor = Convolution(backprops, kept, geometry, tuple(kernel.shape[2:]), shape)
    if geometry.groups > 1 or site.weight is None:
        site.record_dense(factor.dense())
    elif len(backprops) == site.collector.batch_size:
        site.collector.record_convolution(site.weight, factor, axis)
    else:
        site.record_outer(rows, geometry.patches(kept, factor.kernel_size), kept=axis)


@rule(F.conv1d, F.conv2d, F.conv3d)
def convolution(call: Call) -> Tensor:
    """`F.convNd(input, weight, bias, stride, padding, dilation, groups)`."""
    return _convolve(call, *call.args, **call.kwargs)


def _convolve(
    call: Call,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | str | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Tensor:
    if input.dim() != weight.dim() or not call.capture.is_data(input):
        return by_example(call)
    dims = input.dim() - 2
    inputs, pads = _pad(input, padding, weight.shape[2:], _each(dilation, dims))
    geometry = Geometry(_each(stride, dims), pads, _each(dilation, dims), groups)
    site = call.capture.site(weight)
    bias_site = None if bias is None else call.capture.site(bias)
    kept, reduction = None, None
    if site is not None:
        kept = inputs.detach()
        reduction = _worthwhile(site, weight, kept, geometry)
        if reduction is not None:
            with torch.no_grad():
                kept = reduction.run(kept)
    plain_bias = None if bias is None else shared(call, bias)
    sites = (site, bias_site, reduction)
    return _Convolution.apply(inputs, shared(call, weight), plain_bias, kept, call.capture.anchor, geometry, sites)


def _worthwhile(site: Site, weight: Tensor, inputs: Tensor, geometry: Geometry) -> Reduction | None:
    """Return what reduces the input under `weight` to what its sketch needs of it, or None to keep the input whole."""
    basis = site.weight.compression.basis(Axis.COLS) if site.weight is not None and geometry.groups == 1 else None
    if basis is None:
        return None
    reduction = Reduction(basis, geometry, tuple(weight.shape))
    return reduction if reduction.numel(inputs) < _WORTHWHILE * inputs.shape[1:].numel() else None


def _each(value: int | tuple[int, ...], dims: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values


def _pad(
    inputs: Tensor, padding: int | str | tuple[int, ...], kernel_size: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[Tensor, tuple[int, ...]]:
    """Return the input and the symmetric padding that is left to the convolution."""
    dims = len(kernel_size)
    if not isinstance(padding, str):
        return inputs, _each(padding, dims)
    if padding == "valid":
        return inputs, (0,) * dims
    totals = [step * (size - 1) for size, step in zip(kernel_size, dilation, strict=True)]
    pads = [pad for total in reversed(totals) for pad in (total // 2, total - total // 2)]
    return F.pad(inputs, pads), (0,) * dims
