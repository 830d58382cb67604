"""Take noise out of matrices by shrinking their singular values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lowkey.checks import require_number
from lowkey.errors import ConfigError, ShapeError
from lowkey.refine.spectrum import Triplets, triplets_above
from lowkey.refine.spiked import bulk_edge, shrunk_values


def shrink(matrix: Float[Tensor, "M N"], noise_std: float, *, kappa: float = 1.02, norm_correction: bool = True) -> Float[Tensor, "M N"]:
    """Keep what stands out of the noise in a matrix, at the strength that comes closest to the signal.

    Args:
        matrix: A matrix of low rank, to each entry of which independent Gaussian noise was added.
        noise_std: Standard deviation of that noise, known publicly.
        kappa: The matrix counts as noise alone unless its largest singular value is above `kappa` times the edge of the noise's own.
        norm_correction: Give the result the Frobenius norm of `matrix`.

    Returns:
        The sum of the singular triplets above the edge with their values shrunk; `matrix` itself if it counts as noise alone,
        if `noise_std` is zero (then nothing is to be shrunk), or if it holds entries that are not finite.

    Raises:
        ConfigError: `kappa` is below 1, or `noise_std` is no standard deviation.
        ShapeError: `matrix` is no matrix.

    Guarantee:
        A function of its arguments: of a release and its public noise level it is post-processing.

    Assumes:
        Float32 products are taken in full, as torch does by default; in TF32 what is within 0.1 % of the edge may fall on either side.
        Large sides: the formulas are limits, and in a matrix with `m` rows or columns the edge is blurred by a share of order `m^(-2/3)`.

    Cost:
        Far less than a singular value decomposition; see `lowkey.refine.spectrum`.

    References:
        [denoise2025], section 3.2.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> signal = torch.outer(torch.ones(60), torch.ones(80))
        >>> noisy = signal + 2.0 * torch.randn(60, 80, generator=generator)
        >>> shrunk = shrink(noisy, 2.0, norm_correction=False)
        >>> round(float((noisy - signal).norm() / signal.norm()), 2), round(float((shrunk - signal).norm() / signal.norm()), 2)
        (1.98, 0.36)
    """
    return shrink_all([matrix], noise_std, kappa=kappa, norm_correction=norm_correction)[0]


def shrink_all(matrices: Sequence[Tensor], noise_std: float, *, kappa: float = 1.02, norm_correction: bool = True) -> list[Tensor]:
    """Apply `shrink` to each of many matrices with one noise level, at a lower price than one by one.

    Args:
        matrices: Matrices of any shapes.
        noise_std: Standard deviation of the noise on every entry of all of them.
        kappa: As for `shrink`.
        norm_correction: As for `shrink`.

    Returns:
        One matrix for each; new tensors where something was shrunk, and the same objects elsewhere.

    Raises:
        ConfigError: `kappa` is below 1, or `noise_std` is no standard deviation.
        ShapeError: Something is no matrix.
    """
    check_kappa(kappa)
    _check(matrices, noise_std)
    if noise_std == 0.0:
        return list(matrices)
    edges = [bulk_edge((matrix.shape[0], matrix.shape[1]), noise_std) for matrix in matrices]
    # NUMERICS: inside an autocast the products that tell signal from noise would keep 8 bits.
    with torch.autocast(matrices[0].device.type if matrices else "cpu", enabled=False):
        found = triplets_above(matrices, edges, kappa)
        return [
            matrix if triplets is None else _shrunk(matrix, triplets, noise_std, norm_correction=norm_correction)
            for matrix, triplets in zip(matrices, found, strict=True)
        ]


def check_kappa(kappa: float) -> None:
    """Refuse a threshold that noise alone would pass.

    Raises:
        ConfigError: `kappa` is below 1 or not finite.
    """
    if not 1.0 <= require_number("kappa", kappa) < math.inf:
        raise ConfigError(
            f"kappa={kappa!r} is no threshold. It multiplies the edge of pure noise and must be finite and at least 1. "
            "Use one of 1.01, 1.02, 1.05 and 1.1."
        )


def _check(matrices: Sequence[Tensor], noise_std: float) -> None:
    if not 0.0 <= noise_std < math.inf:
        raise ConfigError(
            f"noise_std={noise_std!r} is no standard deviation. It must be finite and not negative. Pass the noise_std of the release."
        )
    for matrix in matrices:
        if matrix.dim() != 2:
            raise ShapeError(
                f"a tensor of shape {tuple(matrix.shape)} was to be shrunk. Only a matrix has singular values. "
                "Flatten it to two axes, or leave it out."
            )


def _shrunk(matrix: Tensor, triplets: Triplets, noise_std: float, *, norm_correction: bool) -> Tensor:
    values = shrunk_values(triplets.values, (matrix.shape[0], matrix.shape[1]), noise_std)
    if norm_correction:
        # The triplets are orthonormal, so the norm of the result is that of its values.
        values = values * (triplets.norm / values.norm())
    return triplets.with_values(values).to(matrix.dtype)
