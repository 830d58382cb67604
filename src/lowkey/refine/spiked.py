r"""Closed forms of the spiked matrix model: a matrix of low rank under noise with independent entries.

    Y = X + s Z,   Z of shape m x n with standard normal entries

In large matrices the singular values of the noise fill a bulk that ends at the edge `s (sqrt(m) + sqrt(n))`.
A singular value of X above `s (m n)^(1/4)` shows as one of Y above the edge; a smaller one is lost in the bulk.

All functions work in float64 and on any device.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

Shape = tuple[int, int]


def bulk_edge(shape: Shape, noise_std: float) -> float:
    """Return where the singular values of pure noise end: `noise_std * (sqrt(m) + sqrt(n))`.

    Args:
        shape: The matrix's number of rows and columns.
        noise_std: Standard deviation of each entry of the noise.

    Example:
        >>> bulk_edge((4, 9), 0.5)
        2.5
    """
    rows, cols = shape
    return noise_std * (math.sqrt(rows) + math.sqrt(cols))


def observed_values(signal: Float[Tensor, " R"], shape: Shape, noise_std: float) -> Float[Tensor, " R"]:
    """Return where singular values of the signal show in the noisy matrix.

    Args:
        signal: Singular values of the signal.
        shape: The matrix's number of rows and columns.
        noise_std: Standard deviation of each entry of the noise.

    Returns:
        `sqrt((x + n s^2 / x) (x + m s^2 / x))` for values above `s (m n)^(1/4)`, the edge for the others.

    References:
        [denoise2025], Eq. 3.
    """
    signal = signal.double()
    rows, cols, noise = *shape, noise_std**2
    shown = ((signal + cols * noise / signal) * (signal + rows * noise / signal)).sqrt()
    return torch.where(signal > noise_std * (rows * cols) ** 0.25, shown, bulk_edge(shape, noise_std))


def signal_values(observed: Float[Tensor, " R"], shape: Shape, noise_std: float) -> Float[Tensor, " R"]:
    """Return the singular values of the signal that show as `observed`: the inverse of `observed_values` above the edge.

    Args:
        observed: Singular values of the noisy matrix, at or above the edge.
        shape: The matrix's number of rows and columns.
        noise_std: Standard deviation of each entry of the noise.

    Returns:
        `sqrt((y^2 - (m + n) s^2 + sqrt((y^2 - (m + n) s^2)^2 - 4 m n s^4)) / 2)`.

    References:
        [denoise2025], Eq. 8.
    """
    observed = observed.double()
    noise = (shape[0] + shape[1]) * noise_std**2
    return ((observed.square() - noise + _root(observed, shape, noise_std)) / 2.0).sqrt()


def shrunk_values(observed: Float[Tensor, " R"], shape: Shape, noise_std: float) -> Float[Tensor, " R"]:
    """Return the weights of the observed singular vectors that come closest to the signal.

    A signal's value times the cosines between its singular vectors and the observed ones, which is smaller than the value itself:
    `sqrt((y^2 - (m + n) s^2)^2 - 4 m n s^4) / y` above the edge, and zero below.

    Args:
        observed: Singular values of the noisy matrix.
        shape: The matrix's number of rows and columns.
        noise_std: Standard deviation of each entry of the noise.

    Returns:
        One weight per value; `observed` itself without noise.

    References:
        [denoise2025], Eq. 7 and 8, whose three factors are multiplied out here.

    Example:
        >>> shrunk_values(torch.tensor([4.0, 5.0, 10.0]), (4, 9), 1.0)
        tensor([0.0000, 0.0000, 8.6168], dtype=torch.float64)
    """
    observed = observed.double()
    return torch.where(observed > bulk_edge(shape, noise_std), _root(observed, shape, noise_std) / observed, 0.0)


def _root(observed: Tensor, shape: Shape, noise_std: float) -> Tensor:
    """Return `sqrt((y^2 - (m + n) s^2)^2 - 4 m n s^4)`, which is zero at both ends of the bulk."""
    upper = bulk_edge(shape, noise_std)
    lower = noise_std * abs(math.sqrt(shape[0]) - math.sqrt(shape[1]))
    # NUMERICS: as a product over both ends of the bulk no difference of squares cancels near the edge.
    inner = (observed - upper) * (observed + upper) * (observed - lower) * (observed + lower)
    return inner.clamp_min(0.0).sqrt()
