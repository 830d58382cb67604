"""Denoising from the paper's formula: a full singular value decomposition in float64, and Eq. 8 factor by factor."""

from __future__ import annotations

import math

import torch
from dense_steps import OPTIMIZERS, SUBJECTS, Gradients, assert_same_weights, take, trained, twins
from torch import Tensor

import lowkey as lk
from lowkey.methods import Target

CLIP_NORM = 0.3
LINEAR = {
    "MLP": ["body.0.weight", "body.3.weight", "body.5.weight"],
    "used twice": ["layer.weight", "head.weight"],
    "convolutions": ["head.weight"],
    "input-first": ["up.weight", "down.weight", "head.weight"],
}
"""The matrices of linear layers in each subject."""


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


class DenseDenoise:
    """`Denoise` from its formula: equation (R) gives the noise level, and the average is taken anew from all releases."""

    def __init__(self, names: list[str], method: lk.Denoise, noise_std: float) -> None:
        self.names, self.method, self.noise_std = names, method, noise_std
        self.releases: list[Gradients] = []
        self.num_shrunk = 0

    def __call__(self, released: Gradients) -> Gradients:
        self.releases.append(released)
        return {name: self.shrunk(name) if name in self.names else block for name, block in released.items()}

    def shrunk(self, name: str) -> Tensor:
        weights = [1.0]
        if self.method.target is Target.MOMENTUM:
            weights = [self.method.decay ** (len(self.releases) - 1 - index) for index in range(len(self.releases))]
        recent = self.releases[-len(weights) :]
        noisy = sum((weight * blocks[name] for weight, blocks in zip(weights, recent, strict=True)), torch.zeros(())) / sum(weights)
        noise_std = self.noise_std * math.hypot(*weights) / sum(weights)
        found = dense_shrink(noisy, noise_std, self.method.kappa, self.method.norm_correction) if noise_std else noisy
        self.num_shrunk += found is not noisy
        return found


def denoise_beside_its_formula(method: lk.Denoise, subject: str, optimizer: str, plan: lk.Plan, steps: int = 4) -> DenseDenoise:
    """Train twice, and demand the same weights; return what the formula saw."""
    build, batch = SUBJECTS[subject]
    model, dense = twins(build)
    noise_std = plan.noise_multiplier * CLIP_NORM / plan.expected_batch_size
    formula, releases = DenseDenoise(LINEAR[subject], method, noise_std), []
    stepper = OPTIMIZERS[optimizer](list(trained(dense).values()))
    with lk.privatize(model, OPTIMIZERS[optimizer], method=method, plan=plan, clip_norm=CLIP_NORM, noise=lk.SeededNoise(3)) as private:
        private.on_release(lambda released: releases.append({name: block.clone() for name, block in released.blocks.items()}))
        for step in range(steps):
            take(private, model, batch)
            for name, gradient in formula(releases[step]).items():
                trained(dense)[name].grad = gradient
            stepper.step()
    assert_same_weights(model, dense)
    return formula
