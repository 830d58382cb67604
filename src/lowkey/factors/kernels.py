"""Per-example gradients of a convolution's kernel, as (output gradients, inputs), and what a basis leaves of them.

Axes: B examples, L output positions, I inputs per patch (channels x kernel), O output channels, K kept dimensions
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from lowkey.factors.factor import Dense, Factor, Outer, squared_norms_of, wide_dtype, widen

_HARDLY_MORE = 1.25
_SLOWER = 3
"""How much longer products of patches take than kernels, for the same number of multiplications."""
_IN_CACHE = 1 << 20
"""Temporaries over a batch are cut so that they hold about this many numbers."""
_KERNELS = 600_000
"""Kernels are formed about this many numbers at a time, of a power of two of examples; more at once were seen to take twice as long."""


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
class Reduction:
    """What turns an input into what a sketch of the kernel needs of it.

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
        # Under a single tap a patch is a pixel, and only those that the kernel meets are wanted.
        return len(self.basis) == self.kernel_shape[1] < math.prod(self.kernel_shape[1:])

    def numel(self, inputs: Tensor) -> int:
        """Return how many numbers of an example are left."""
        positions = inputs.shape[2:].numel() if self.is_pixelwise else self.geometry.num_positions(inputs, self.kernel_shape[2:])
        return positions * self.basis.shape[1]

    def run(self, inputs: Tensor) -> Tensor:
        """Reduce."""
        basis = self.basis.T.to(inputs.dtype)
        if self.is_pixelwise:
            return (basis @ inputs.flatten(2)).unflatten(2, inputs.shape[2:])
        return self.geometry.run(inputs, basis.reshape(-1, *self.kernel_shape[1:]))


@dataclass(frozen=True)
class Convolution:
    """Per-example gradients of a kernel, or of a kernel between reduced outputs and the inputs, as (output gradients, inputs).

    `shape` is the block's own shape, of which the kernel is a view.
    """

    backprops: Tensor
    inputs: Tensor
    geometry: Geometry
    kernel_size: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return self.backprops.numel() + self.inputs.numel()

    def squared_norms(self) -> Float[Tensor, " B"]:
        positions, channels = self.backprops[0, 0].numel(), sum(self._kernel_shape[:2])
        # Products cost positions^2 * channels per example, kernels positions * numel, and those run faster.
        if _SLOWER * positions * channels >= math.prod(self.shape) or self.geometry.groups > 1:
            # PRIVACY: a batch is summed in another order than an example alone; where terms cancel, the sum holds what the norm does not.
            squares = torch.cat([Dense(part._kernels()).squared_norms() for part in self._in_parts()])
            return (squares.sqrt() + self._rounding()).square()
        few = _IN_CACHE // (positions * max(positions, math.prod(self._kernel_shape[1:])))
        return torch.cat([part._squared_norms_by_products() for part in self.split(few)])

    def add_sum(self, total: Tensor, weights: Float[Tensor, " B"]) -> None:
        scaled = widen(self.backprops) * weights.view(-1, *[1] * (self.backprops.dim() - 1))
        total.add_(self.geometry.backward(scaled, widen(self.inputs), self._kernel(), of_input=False).view(self.shape))

    def dense(self) -> Tensor:
        parts = self._in_parts()
        kernels = self._kernel().new_empty(len(self.backprops), *self.shape)
        for part, place in zip(parts, kernels.split(len(parts[0].backprops)), strict=True):
            place.copy_(part._kernels())
        return kernels

    def _kernels(self) -> Tensor:
        # With every example a group of channels of its own, the sum over the batch has one term for each kernel.
        batch, shape = len(self.backprops), self._kernel_shape
        backprops, inputs = (widen(side).reshape(1, -1, *side.shape[2:]) for side in (self.backprops, self.inputs))
        geometry = replace(self.geometry, groups=batch * self.geometry.groups)
        kernels = inputs.new_empty(batch * shape[0], *shape[1:])
        return geometry.backward(backprops, inputs, kernels, of_input=False).view(batch, *self.shape)

    def without(self, bad: Bool[Tensor, " B"]) -> Convolution:
        mask = bad.view(-1, *[1] * (self.backprops.dim() - 1))
        return replace(self, backprops=self.backprops.masked_fill(mask, 0.0), inputs=self.inputs.masked_fill(mask, 0.0))

    def compacted(self) -> Factor:
        """Return plain gradients where those are smaller, or hardly larger and needed for the norms anyway."""
        if math.prod(self.shape) * len(self.backprops) <= _HARDLY_MORE * self.numel:
            return Dense(self.dense())
        return self

    def times(self, basis_IK: Float[Tensor, "I K"], shape: tuple[int, ...]) -> Outer:
        """Multiply the side of the inputs: a convolution with the basis as its kernel, which has K output channels."""
        reduced = Reduction(basis_IK, self.geometry, self._kernel_shape).run(self.inputs)
        return Outer(self.backprops.flatten(2).mT, reduced.flatten(2).mT, shape)

    def times_channels(self, basis_CK: Float[Tensor, "C K"], shape: tuple[int, ...]) -> Convolution:
        """Multiply the input channels, the same for every tap: a kernel with K input channels is left."""
        return replace(self, inputs=Reduction(basis_CK, self.geometry, self._kernel_shape).run(self.inputs), shape=shape)

    def times_from_left(self, basis_OK: Float[Tensor, "O K"], shape: tuple[int, ...]) -> Convolution:
        """Multiply the side of the outputs: a kernel with K output channels is left."""
        reduced = basis_OK.T.to(self.backprops.dtype) @ self.backprops.flatten(2)
        return replace(self, backprops=reduced.unflatten(2, self.backprops.shape[2:]), shape=shape)

    def split(self, few: int) -> list[Convolution]:
        """Return a few examples at a time, at least one."""
        few = max(1, few)
        sides = zip(self.backprops.split(few), self.inputs.split(few), strict=True)
        return [replace(self, backprops=backprops, inputs=inputs) for backprops, inputs in sides]

    def _in_parts(self) -> list[Convolution]:
        """Return as many examples at a time as their kernels are best formed together."""
        few = min(_IN_CACHE // max(self.inputs[0].numel(), self.backprops[0].numel()), _KERNELS // math.prod(self.shape))
        return self.split(1 << max(0, few.bit_length() - 1))

    def _squared_norms_by_products(self) -> Float[Tensor, " B"]:
        rows, shape = widen(self.backprops).flatten(2), self._kernel_shape
        products = self.geometry.patch_products(widen(self.inputs), self.kernel_size)
        return squared_norms_of(rows.mT @ rows, products, (shape[0], math.prod(shape[1:])))

    @property
    def _kernel_shape(self) -> tuple[int, ...]:
        return (self.backprops.shape[1], self.inputs.shape[1] // self.geometry.groups, *self.kernel_size)

    def _rounding(self) -> Float[Tensor, " B"]:
        """Bound how far two orders of summation may be apart, from the size of the terms that are summed."""
        backprops, inputs = (torch.linalg.vector_norm(widen(side).flatten(1), dim=1) for side in (self.backprops, self.inputs))
        return 32.0 * torch.finfo(backprops.dtype).eps * math.prod(self.kernel_size) ** 0.5 * backprops * inputs

    def _kernel(self) -> Tensor:
        return self.inputs.new_empty(self._kernel_shape, dtype=wide_dtype(self.inputs.dtype))
