"""Carriers of a matrix: orthonormal bases near its leading singular vectors.

Axes: R rows and C columns of the matrix, K kept dimensions
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lowkey.sketch.random import Distribution, draw_basis


def draw_carriers(rows: int, cols: int, rank: int, key: tuple[object, ...]) -> tuple[Float[Tensor, "R K"], Float[Tensor, "K C"]]:
    """Draw orthonormal columns and rows that are a function of `key` alone.

    Guarantee:
        As `draw_basis`: independent of every batch and of every noise key.

    Example:
        >>> left, right = draw_carriers(5, 4, 2, ("an example",))
        >>> bool(torch.allclose(left.T @ left, torch.eye(2).double())), right.shape
        (True, torch.Size([2, 4]))
    """
    return draw_orthonormal(rows, rank, (*key, "left")), draw_orthonormal(cols, rank, (*key, "right")).T


def draw_orthonormal(width: int, rank: int, key: tuple[object, ...]) -> Float[Tensor, "W K"]:
    """Draw orthonormal columns that are a function of `key` alone.

    Guarantee:
        As `draw_basis`: independent of every batch and of every noise key.
    """
    return draw_basis(Distribution.STIEFEL, width, rank, key) * (rank / width) ** 0.5


def power_iteration(
    matrix: Float[Tensor, "R C"], left: Float[Tensor, "R K"], right: Float[Tensor, "K C"], num_iterations: int
) -> tuple[Float[Tensor, "R K"], Float[Tensor, "K C"]]:
    """Turn carriers towards the leading singular vectors of `matrix`.

    Args:
        matrix: What to follow.
        left: Where to start on a side on which the matrix is zero; of no influence elsewhere.
        right: Where the iteration starts.
        num_iterations: How often both sides are multiplied.

    Returns:
        Orthonormal columns and orthonormal rows.

    Guarantee:
        A function of its arguments, so as public as they are.

    Cost:
        `O(K R C)` time for an iteration.

    References:
        [yu2021rgp], Alg. 2, with Householder reflections in place of Gram-Schmidt: they stay orthonormal where the rank is lower than K.

    Example:
        >>> start = torch.ones(3, 1), torch.ones(1, 2)
        >>> left, right = power_iteration(torch.tensor([[0.0, 2.0], [0.0, 0.0], [0.0, 0.0]]), *start, 1)
        >>> left.abs().round().T, right.abs().round()
        (tensor([[1., 0., 0.]]), tensor([[0., 1.]]))
    """
    spare_left, spare_right = left, right
    for _ in range(num_iterations):
        left = _orthonormal(matrix @ right.T, spare_left)
        right = left.T @ matrix
    return left, _orthonormal(right.T, spare_right.T).T


def _orthonormal(columns: Float[Tensor, "N K"], spare: Float[Tensor, "N K"]) -> Float[Tensor, "N K"]:
    # NUMERICS: far below the last digit of any number in sight; a matrix of zeros gets the spare directions, not the first coordinates.
    return torch.linalg.qr(columns + spare * torch.finfo(columns.dtype).tiny ** 0.5)[0]
