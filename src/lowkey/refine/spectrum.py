"""Singular triplets above an edge, without the rest of the spectrum.

    Axes: K matrices, S rows of the shorter side and L of the longer side of a matrix, R triplets above the edge

Most matrices of a private run show nothing above the noise.
One Cholesky factorisation of a Gram matrix proves it, at a small part of the price of singular values.
Eigenvectors are searched only elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lowkey.refine.lanczos import leading_vectors, lies_below

_CHUNK_ELEMENTS = 1 << 23
"""Gram matrices are held together up to about this many numbers."""

_FLOAT32_RANGE = 256.0
"""How far squares of singular values may tower above the edge before float32 loses what is near it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Triplets:
    """The leading singular triplets of one matrix.

    Fields:
        values: Singular values, the largest first.
        short: Singular vectors of the shorter side, one per column.
        images: `short^T` times the matrix, its shorter side first: singular vectors of the longer side, times their values.
        norm: The Frobenius norm of the whole matrix.
        is_tall: Whether the shorter side is that of the columns.
    """

    values: Float[Tensor, " R"]
    short: Float[Tensor, "S R"]
    images: Float[Tensor, "R L"]
    norm: Float[Tensor, ""]
    is_tall: bool

    def with_values(self, values: Float[Tensor, " R"]) -> Tensor:
        """Return the matrix of these triplets with other values."""
        ratios = (values / self.values).to(self.short.dtype)
        return (self.images.T * ratios) @ self.short.T if self.is_tall else (self.short * ratios) @ self.images


def triplets_above(matrices: Sequence[Tensor], edges: Sequence[float], factor: float) -> list[Triplets | None]:
    """Return the triplets above the edge of each matrix that reaches beyond it.

    Args:
        matrices: Matrices of any shapes.
        edges: For each, the level above which triplets are wanted; positive.
        factor: At least 1. A matrix counts only if its largest singular value is above `factor` times its edge.

    Returns:
        Every triplet above the edge for a matrix that counts; None for the others, and for one that is not finite.
        Singular values within rounding of an edge may fall on either side.

    Cost:
        For a matrix that does not count, one Gram matrix and one Cholesky factorisation of the shorter side: that is the proof.
        For one that does, `leading_vectors` of its Gram matrix as well.
    """
    wide = [_wide(matrix, edge) for matrix, edge in zip(matrices, edges, strict=True)]
    found: list[Triplets | None] = [None] * len(wide)
    for chunk in _chunks(wide):
        grams = _grams([wide[index] for index in chunk])
        levels = torch.tensor([(factor * edges[index]) ** 2 for index in chunk], dtype=grams.dtype, device=grams.device)
        settled = lies_below(grams, levels, max(wide[index].shape[1] for index in chunk)).tolist()
        for place, index in enumerate(chunk):
            if not settled[place]:
                is_tall = matrices[index].shape[0] > matrices[index].shape[1]
                found[index] = _triplets(wide[index], grams[place], edges[index], factor, is_tall=is_tall)
    return found


def _wide(matrix: Tensor, edge: float) -> Float[Tensor, "S L"]:
    """Return the matrix with its shorter side first, in a dtype that holds the squares of its entries."""
    # NUMERICS: in float32 the square of 1e-23 is zero, and that of 1e20 infinite.
    narrow = matrix.dtype != torch.float64 and 1e-12 < edge < 1e12
    return (matrix.T if matrix.shape[0] > matrix.shape[1] else matrix).to(torch.float32 if narrow else torch.float64)


def _chunks(wide: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the indices of matrices whose Gram matrices are of one size and kind, not too many at once."""
    groups: dict[tuple[int, torch.dtype, torch.device], list[int]] = {}
    for index, matrix in enumerate(wide):
        groups.setdefault((len(matrix), matrix.dtype, matrix.device), []).append(index)
    for (size, _, _), indices in groups.items():
        count = max(1, _CHUNK_ELEMENTS // max(1, size * size))
        yield from (indices[start : start + count] for start in range(0, len(indices), count))


def _grams(wide: Sequence[Tensor]) -> Float[Tensor, "K S S"]:
    """Return each matrix times its transpose: three of four blocks, as the fourth is one of them transposed."""
    size = len(wide[0])
    half = size // 2
    grams = wide[0].new_empty(len(wide), size, size)
    for gram, matrix in zip(grams, wide, strict=True):
        upper, lower = matrix[:half], matrix[half:]
        gram[:half, :half] = upper @ upper.T
        gram[half:, half:] = lower @ lower.T
        gram[half:, :half] = lower @ upper.T
        gram[:half, half:] = gram[half:, :half].T
    return grams


def _triplets(wide: Tensor, gram: Tensor, edge: float, factor: float, *, is_tall: bool) -> Triplets | None:
    """Return the triplets above the edge, if the largest is far enough above it."""
    # NUMERICS: torch's own norm of four million float32 numbers has been seen to lose 1e-4 of it; the diagonal holds short sums.
    norm = gram.diagonal().double().sum().sqrt()
    if bool(torch.isfinite(norm)):
        vectors = leading_vectors(gram, edge**2)
        images = vectors.T @ wide
        # NUMERICS: as the length of an image a value has the square of its vector's error; as a root it would have the Gram matrix's.
        values = images.norm(dim=1)
        largest = float(values.max()) if len(values) else 0.0
        if wide.dtype == torch.float64 or largest**2 <= _FLOAT32_RANGE * edge**2:
            keep = values > edge
            triplets = Triplets(values=values[keep], short=vectors[:, keep], images=images[keep], norm=norm, is_tall=is_tall)
            return triplets if largest > factor * edge else None
    elif wide.dtype == torch.float64:
        return None
    wide = wide.double()
    return _triplets(wide, wide @ wide.T, edge, factor, is_tall=is_tall)
