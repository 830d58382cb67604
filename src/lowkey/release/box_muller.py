"""Uniform bits to standard normals, by the transform of Box and Muller.

    Axes: K tiles, H pairs of a tile, W words of a tile

A tile holds `TILE` numbers and is made of words of its own, so that a number depends on its place and not on how many are drawn.
Its first half is `radius * cos(angle)`, its second half `radius * sin(angle)`, pair by pair.
numpy does it, not torch: the threads that share a draw would each start a team of torch's own.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

TILE = 512
"""Numbers that are made of one stretch of words."""

_PAIRS = TILE // 2
_LOW_63 = np.uint64((1 << 63) - 1)

Real = type[np.float32] | type[np.float64]
Reals = NDArray[np.float32 | np.float64]


def num_words(count: int, dtype: Real) -> int:
    """Return how many 64-bit words `count` numbers of `dtype` are made of.

    Guarantee:
        A function of `count` and `dtype` alone; whole tiles, so that a longer draw begins with the words of a shorter one.
    """
    return -(-count // TILE) * (_PAIRS + _angle_words(dtype))


def normals(words: NDArray[np.uint64], std: float, dtype: Real) -> Reals:
    """Make `N(0, std²)` numbers of independent uniform words.

    Args:
        words: As many as `num_words` says.
        std: The standard deviation.
        dtype: float32 or float64.

    Returns:
        `TILE` numbers for each tile's stretch of words.

    Guarantee:
        For uniform words and exact arithmetic on them, the numbers are independent and normal, up to the steps of 63-bit radii and of
        angles of 32 bits (float32) or 64 (float64); none is beyond 9.35 `std`, where a normal falls with probability 1e-20.
        Radius and angle share no bit. No word gives infinity or NaN.
        Rounding moves a number of radius `r std` by at most `p (r + 1/r) std`, with `p` 5e-7 in float32 and 2e-15 in float64.

    References:
        [box1958], equations 1 and 2.

    Example:
        >>> farthest = np.zeros(num_words(1, np.float64), np.uint64)
        >>> round(float(normals(farthest, 1.0, np.float64)[0]), 2)
        9.35
    """
    tiles = words.reshape(-1, _PAIRS + _angle_words(dtype))
    radius, angle = _radii(tiles[:, :_PAIRS], dtype), _angles(tiles[:, _PAIRS:], dtype)
    radius *= dtype(std)
    pairs = np.empty((len(tiles), 2, _PAIRS), dtype)
    np.multiply(radius, np.cos(angle), out=pairs[:, 0])
    np.multiply(radius, np.sin(angle, out=angle), out=pairs[:, 1])
    return pairs.reshape(-1)


def _radii(words: NDArray[np.uint64], dtype: Real) -> Reals:
    # NUMERICS: (k + 1) / 2^63 lies in (0, 1], so the logarithm is finite; in the tail, where k is small, all its bits count.
    # The logarithm is taken in float64 for float32 numbers too: near one, where radii are small, float32 cannot tell most words apart.
    squares = (words & _LOW_63).view(np.int64).astype(np.float64)
    squares += 1.0
    squares *= 2.0**-63
    np.log(squares, out=squares)
    squares *= -2.0
    radii = squares.astype(dtype, copy=False)
    return np.sqrt(radii, out=radii)


def _angles(words: NDArray[np.uint64], dtype: Real) -> Reals:
    """Spread signed integers over a full turn: halves of words for float32, whole words for float64."""
    bits = 8 * np.dtype(dtype).itemsize
    angles = words.view(np.int32 if bits == 32 else np.int64).astype(dtype)
    angles *= dtype(math.pi * 2.0 ** (1 - bits))
    return angles


def _angle_words(dtype: Real) -> int:
    return _PAIRS * np.dtype(dtype).itemsize // 8
