"""Convolutions in one, two and three dimensions.

Axes: B examples, L output positions, I inputs per patch (channels x kernel), O output channels
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lowkey.factors.capture import Site
from lowkey.factors.collector import Axis
from lowkey.factors.elementwise import sum_positions
from lowkey.factors.factor import Dense, Factor, squared_norms_of, wide_dtype, widen
from lowkey.factors.fallback import by_example
from lowkey.factors.registry import MARK, Call, rule

_HARDLY_MORE = 1.25
_WORTHWHILE = 0.5
"""An input is reduced at once if that leaves less than this part of it; more often than not the layer before keeps it anyway."""
_SLOWER = 3
"""How much longer products of patches take than kernels, for the same number of multiplications."""
_IN_CACHE = 1 << 20
"""Temporaries over a batch are cut so that they hold about this many numbers."""


@dataclass(frozen=True)
class Geometry:
    """How a convolution's kernel moves over its input."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def run(self, inputs: Tensor, kernel: Tensor, bias: Tensor | None = None) -> Tensor:
        """Convolve."""
        zeros = (0,) * len(self.stride)
        return torch.convolution(inputs, kernel, bias, self.stride, self.padding, self.dilation, False, zeros, self.groups)

    def num_positions(self, inputs: Tensor, kernel_size: tuple[int, ...]) -> int:
        """Return how many places of the input the kernel is laid on."""
        axes = zip(inputs.shape[2:], kernel_size, self.stride, self.padding, self.dilation, strict=True)
        return math.prod((size + 2 * pad - step * (width - 1) - 1) // stride + 1 for size, width, stride, pad, step in axes)

    def backward(self, backprops: Tensor, inputs: Tensor, kernel: Tensor, of_input: bool) -> Tensor:
        """Return the gradient of the input or of the kernel, summed over the batch."""
        zeros = (0,) * len(self.stride)
        wanted = [of_input, not of_input, False]
        found = torch.ops.aten.convolution_backward(
            backprops, inputs, kernel, None, self.stride, self.padding, self.dilation, False, zeros, self.groups, wanted
        )
        return found[0 if of_input else 1]

    def patches(self, inputs: Tensor, kernel_size: tuple[int, ...]) -> Float[Tensor, "B L I"]:
        """Return the input under the kernel at each output position."""
        pads = [pad for size in reversed(self.padding) for pad in (size, size)]
        dims = len(kernel_size)
        if dims == 2:
            return F.unfold(inputs, kernel_size, self.dilation, self.padding, self.stride).transpose(1, 2)
        windows = F.pad(inputs, pads)
        for axis, (size, stride, dilation) in enumerate(zip(kernel_size, self.stride, self.dilation, strict=True)):
            windows = windows.unfold(2 + axis, (size - 1) * dilation + 1, stride)[..., ::dilation]
        order = (0, *range(2, 2 + dims), 1, *range(2 + dims, 2 + 2 * dims))
        windows = windows.permute(order)
        return windows.flatten(1 + dims).flatten(1, dims)

    def patch_products(self, inputs: Tensor, kernel_size: tuple[int, ...]) -> Float[Tensor, "B L L"]:
        """Return the inner products of the patches of every two output positions.

        Neighbouring patches share their pixels: the product of two patches is a sum over the kernel of products of two pixels,
        so each product of pixels is computed once. With a stride, only pixels that are whole strides apart ever meet.
        """
        if all(width <= stride for width, stride in zip(kernel_size, self.stride, strict=True)):
            patches = self.patches(inputs, kernel_size)
            return patches @ patches.mT
        padded = F.pad(inputs, [pad for size in reversed(self.padding) for pad in (size, size)])
        sizes = zip(padded.shape[2:], kernel_size, self.stride, self.dilation, strict=True)
        outputs = [(size - dilation * (width - 1) - 1) // stride + 1 for size, width, stride, dilation in sizes]
        total = padded.new_zeros(len(padded), *outputs, *outputs)
        for phase in itertools.product(*map(range, self.stride)):
            taps = [self._taps(axis, start, width) for axis, (start, width) in enumerate(zip(phase, kernel_size, strict=True))]
            if not all(taps):
                continue
            pixels = padded[(..., *(slice(start, None, stride) for start, stride in zip(phase, self.stride, strict=True)))]
            flat = pixels.flatten(2)
            products = (flat.mT @ flat).view(len(padded), *pixels.shape[2:], *pixels.shape[2:])
            for tap in itertools.product(*taps):
                window = [slice(start, start + size) for start, size in zip(tap, outputs, strict=True)]
                total += products[(slice(None), *window, *window)]
        return total.flatten(1, len(outputs)).flatten(2)

    def _taps(self, axis: int, phase: int, width: int) -> list[int]:
        """Return where the kernel's taps of one phase lie, in whole strides."""
        stride, dilation = self.stride[axis], self.dilation[axis]
        return [tap * dilation // stride for tap in range(width) if tap * dilation % stride == phase]


@dataclass(frozen=True)
class Convolution:
    """Per-example gradients of a kernel, as (output gradients, inputs)."""

    backprops: Tensor
    inputs: Tensor
    geometry: Geometry
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return self.backprops.numel() + self.inputs.numel()

    @property
    def rows(self) -> Float[Tensor, "B L O"]:
        """The output gradients, position by position."""
        return self.backprops.flatten(2).mT

    @property
    def patches(self) -> Float[Tensor, "B L I"]:
        """The inputs that they met."""
        return self.geometry.patches(self.inputs, self.shape[2:])

    def squared_norms(self) -> Float[Tensor, " B"]:
        positions, channels = self.backprops[0, 0].numel(), sum(self.shape[:2])
        # Products cost positions^2 * channels per example, kernels positions * numel, and those run faster.
        if _SLOWER * positions * channels >= math.prod(self.shape) or self.geometry.groups > 1:
            # PRIVACY: a batch is summed in another order than an example alone; where terms cancel, the sum holds what the norm does not.
            return (Dense(self.dense()).squared_norms().sqrt() + self._rounding()).square()
        few = _IN_CACHE // (positions * max(positions, math.prod(self.shape[1:])))
        return torch.cat([part._squared_norms_by_products() for part in self._split(few)])

    def add_sum(self, total: Tensor, weights: Float[Tensor, " B"]) -> None:
        scaled = self.backprops.to(total.dtype) * weights.view(-1, *[1] * (self.backprops.dim() - 1))
        total.add_(self.geometry.backward(scaled, self.inputs.to(total.dtype), total.view(self.shape), of_input=False))

    def dense(self) -> Tensor:
        few = max(1, _IN_CACHE // max(self.inputs[0].numel(), self.backprops[0].numel(), math.prod(self.shape)))
        kernels = self._kernel().new_empty(len(self.backprops), *self.shape)
        for part, place in zip(self._split(few), kernels.split(few), strict=True):
            place.copy_(part._kernels())
        return kernels

    def _kernels(self) -> Tensor:
        # With every example a group of channels of its own, the sum over the batch has one term for each kernel.
        batch = len(self.backprops)
        backprops, inputs = (widen(side).reshape(1, -1, *side.shape[2:]) for side in (self.backprops, self.inputs))
        geometry = replace(self.geometry, groups=batch * self.geometry.groups)
        kernels = inputs.new_empty(batch * self.shape[0], *self.shape[1:])
        return geometry.backward(backprops, inputs, kernels, of_input=False).view(batch, *self.shape)

    def without(self, bad: Bool[Tensor, " B"]) -> Convolution:
        mask = bad.view(-1, *[1] * (self.backprops.dim() - 1))
        return replace(self, backprops=self.backprops.masked_fill(mask, 0.0), inputs=self.inputs.masked_fill(mask, 0.0))

    def compacted(self) -> Factor:
        """Return plain gradients where those are smaller, or hardly larger and needed for the norms anyway."""
        if math.prod(self.shape) * len(self.backprops) <= _HARDLY_MORE * self.numel:
            return Dense(self.dense())
        return self

    def _squared_norms_by_products(self) -> Float[Tensor, " B"]:
        rows = widen(self.backprops).flatten(2)
        products = self.geometry.patch_products(widen(self.inputs), self.shape[2:])
        return squared_norms_of(rows.mT @ rows, products, (self.shape[0], math.prod(self.shape[1:])))

    def _split(self, few: int) -> list[Convolution]:
        """Return a few examples at a time, at least one."""
        few = max(1, few)
        sides = zip(self.backprops.split(few), self.inputs.split(few), strict=True)
        return [replace(self, backprops=backprops, inputs=inputs) for backprops, inputs in sides]

    def _rounding(self) -> Float[Tensor, " B"]:
        """Bound how far two orders of summation may be apart, from the size of the terms that are summed."""
        backprops, inputs = (torch.linalg.vector_norm(widen(side).flatten(1), dim=1) for side in (self.backprops, self.inputs))
        return 32.0 * torch.finfo(backprops.dtype).eps * math.prod(self.shape[2:]) ** 0.5 * backprops * inputs

    def _kernel(self) -> Tensor:
        return self.inputs.new_empty(self.shape, dtype=wide_dtype(self.inputs.dtype))


@dataclass(frozen=True)
class Reduction:
    """What turns a layer's input into what the sketch of its kernel needs of it.

    Fields:
        basis: One row per input channel, or one per input channel and tap.
        geometry: How the kernel that is sketched moves.
        kernel_shape: Its shape.
    """

    basis: Float[Tensor, "W K"]
    geometry: Geometry
    kernel_shape: tuple[int, ...]

    @property
    def is_pixelwise(self) -> bool:
        """Whether pixels are reduced one by one, so that a kernel of fewer channels is left to be moved over them."""
        return len(self.basis) == self.kernel_shape[1]

    @property
    def rest(self) -> tuple[int, ...]:
        """The shape of the kernel that is left, where pixels are reduced one by one."""
        return (self.kernel_shape[0], self.basis.shape[1], *self.kernel_shape[2:])

    def numel(self, inputs: Tensor) -> int:
        """Return how many numbers of an example are left."""
        positions = inputs[0, 0].numel() if self.is_pixelwise else self.geometry.num_positions(inputs, self.kernel_shape[2:])
        return positions * self.basis.shape[1]

    def run(self, inputs: Tensor) -> Tensor:
        """Reduce."""
        basis = self.basis.T.to(inputs.dtype)
        if self.is_pixelwise:
            return (basis @ inputs.flatten(2)).unflatten(2, inputs.shape[2:])
        return self.geometry.run(inputs, basis.reshape(-1, *self.kernel_shape[1:]))


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
        sites: tuple[Site | None, Site | None, Reduction | None, bool],
    ) -> Tensor:
        ctx.geometry, ctx.sites, ctx.input_shape = geometry, sites, inputs.shape
        ctx.save_for_backward(kernel, kept, MARK)
        return geometry.run(inputs, kernel, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, backprops: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override] # reason: torch types it with *args
        kernel, kept, _ = ctx.saved_tensors
        site, bias_site, reduction, is_reduced = ctx.sites
        if site is not None and reduction is not None:
            _record_reduced(site, backprops, kept if is_reduced else reduction.run(kept), reduction)
        elif site is not None:
            _record(site, Convolution(backprops, kept, ctx.geometry, tuple(kernel.shape)))
        if bias_site is not None:
            bias_site.record_dense(sum_positions(widen(backprops).flatten(2).transpose(1, 2)))
        gradient = None
        if ctx.needs_input_grad[0]:
            # Only the shape of the input matters here; memory that nobody touches is not taken.
            unread = backprops.new_empty(ctx.input_shape)
            gradient = ctx.geometry.backward(backprops, unread, kernel.to(backprops.dtype), of_input=True)
        return gradient, None, None, None, None, None, None


def _record(site: Site, factor: Convolution) -> None:
    if factor.geometry.groups > 1 or site.weight is None or not site.weight.compression.is_identity:
        site.record_dense(factor.dense())
    elif len(factor.backprops) == site.collector.batch_size:
        site.collector.record_factor(site.weight, factor.compacted())
    else:
        site.record_outer(factor.rows, factor.patches)


def _record_reduced(site: Site, backprops: Tensor, kept: Tensor, reduction: Reduction) -> None:
    factor = Convolution(backprops, kept, reduction.geometry, reduction.rest)
    if not reduction.is_pixelwise:
        site.record_outer(factor.rows, kept.flatten(2).mT, kept=Axis.COLS)
    elif site.weight is not None and len(backprops) == site.collector.batch_size:
        site.collector.record_factor(site.weight, factor.compacted())
    else:
        site.record_outer(factor.rows, factor.patches, kept=Axis.COLS)


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
    kept, reduction, is_reduced = None, None, False
    if site is not None:
        kept = inputs.detach()
        reduction = _reduction(site, weight, geometry)
        if reduction is not None and reduction.numel(kept) < _WORTHWHILE * kept[0].numel():
            is_reduced = True
            with torch.no_grad():
                kept = reduction.run(kept)
    plain = None if bias is None else bias.detach()
    sites = (site, bias_site, reduction, is_reduced)
    return _Convolution.apply(inputs, weight.detach(), plain, kept, call.capture.anchor, geometry, sites)


def _reduction(site: Site, weight: Tensor, geometry: Geometry) -> Reduction | None:
    """Return what reduces the input under `weight`, or None to keep it whole."""
    basis = site.weight.compression.basis(Axis.COLS) if site.weight is not None and geometry.groups == 1 else None
    return None if basis is None else Reduction(basis, geometry, tuple(weight.shape))


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
