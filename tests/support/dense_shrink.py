"""Denoising from the paper's formula: a full singular value decomposition in float64, and Eq. 8 factor by factor."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def dense_shrink(matrix: Tensor, noise_std: float, kappa: float, norm_correction: bool) -> Tensor:
    """[denoise2025], section 3.2, with `m <= n` or not."""
    noisy = matrix.double()
    (rows, cols), noise = noisy.shape, noise_std**2
    edge = noise_std * (math.sqrt(cols) + math.sqrt(rows))
    left, observed, right = torch.linalg.svd(noisy, full_matrices=False)
    if observed[0] <= kappa * edge:
        return noisy
    values = torch.zeros_like(observed)
    for index, value in enumerate(observed.tolist()):
        if value > edge:
            # The inverse of Eq. 3, a quadratic equation for the square.
            middle = value**2 - (rows + cols) * noise
            signal = math.sqrt((middle + math.sqrt(middle**2 - 4 * rows * cols * noise**2)) / 2)
            gain = signal**4 - rows * cols * noise**2
            cosines = math.sqrt(gain / (signal**4 + rows * signal**2 * noise)) * math.sqrt(gain / (signal**4 + cols * signal**2 * noise))
            values[index] = signal * cosines
    best = left @ torch.diag(values) @ right
    return best * (noisy.norm() / best.norm()) if norm_correction else best


def spiked(shape: tuple[int, int], spikes: list[float], noise_std: float = 1.0, seed: int = 0) -> Tensor:
    """A matrix with given singular values, in units of the smallest that can be seen, under noise; float64."""
    generator = torch.Generator().manual_seed(seed)
    rows, cols = shape
    noisy = torch.randn(shape, generator=generator, dtype=torch.float64)
    for left, right, spike in zip(frame(rows, len(spikes), generator), frame(cols, len(spikes), generator), spikes, strict=True):
        noisy += spike * (rows * cols) ** 0.25 * torch.outer(left, right)
    return noise_std * noisy


def frame(size: int, count: int, generator: torch.Generator) -> Tensor:
    """Random orthonormal rows."""
    return torch.linalg.qr(torch.randn(size, count, generator=generator, dtype=torch.float64))[0].T
