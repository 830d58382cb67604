"""The few eigenvectors of a symmetric matrix whose eigenvalues lie above a level, and the proof that no other does.

    Axes: S rows and columns of the matrix, R eigenvectors above the level

The vectors are searched by Lanczos' method and then believed for three checks alone, which know nothing of the search:
they are orthonormal, the matrix maps each to a multiple of itself, and a Cholesky factorisation shows that the rest lies below the level.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

_DIRECT_SIZE = 128
"""Up to this size a full eigendecomposition takes less time than the search."""


def leading_vectors(gram: Float[Tensor, "S S"], level: float) -> Float[Tensor, "S R"]:
    """Return orthonormal eigenvectors for every eigenvalue above `level`, the largest eigenvalue's first.

    Args:
        gram: A symmetric matrix without negative eigenvalues.
        level: Eigenvectors at or below it are left out.

    Returns:
        The vectors. Eigenvalues within rounding of the level may fall on either side.

    Cost:
        `O(S^2)` for each of some dozen steps, and one Cholesky factorisation.
        A full eigendecomposition where those do not settle it, as when many eigenvalues lie above the level or one very close to it.

    Example:
        >>> leading_vectors(torch.diag(torch.tensor([1.0, 9.0, 4.0])), 2.0).abs()
        tensor([[0., 0.],
                [1., 0.],
                [0., 1.]])
    """
    found = _search(gram, level) if len(gram) > _DIRECT_SIZE else None
    if found is not None:
        return found
    values, vectors = torch.linalg.eigh(gram)
    return vectors[:, values > level].flip(1)


def lies_below(gram: Float[Tensor, "*K S S"], level: float | Float[Tensor, "*K"], num_terms: int = 0) -> Tensor:
    """Return whether a Cholesky factorisation shows that every eigenvalue of `gram` is below `level`.

    Args:
        gram: Symmetric matrices without negative eigenvalues.
        level: What to compare with.
        num_terms: How many products were added up for an entry of `gram`, if their rounding is to be covered too.

    Returns:
        One answer for each matrix. False says nothing; entries that are not finite give False.
    """
    size, eps = gram.shape[-1], torch.finfo(gram.dtype).eps
    # NUMERICS: rounding of the sums in a Gram matrix and in its factors has been seen to shift the answer by less than eps;
    # this leaves room for a thousand times as much, so that True is safe, and costs a search now and then.
    safe = torch.as_tensor(level, dtype=gram.dtype, device=gram.device) * (1.0 - (size + num_terms) * eps)
    remainder = gram.neg()
    remainder.diagonal(dim1=-2, dim2=-1).add_(safe[..., None])
    return torch.linalg.cholesky_ex(remainder).info == 0


class _Lanczos:
    """An orthonormal basis that grows by the image of its last vector, and the matrix seen through it."""

    def __init__(self, gram: Tensor, most: int) -> None:
        self._gram = gram
        # One vector per row, so that each is contiguous.
        self._basis = gram.new_empty(most + 1, len(gram))
        self._seen = gram.new_zeros(most, most)
        self._size = 0
        # The start is arbitrary: what is found does not depend on it. Random, it is orthogonal to no vector in particular.
        start = torch.randn(len(gram), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        self._basis[0] = (start / start.norm()).to(gram)

    def grow_to(self, size: int) -> None:
        """Add vectors until there are `size`."""
        for at in range(self._size, size):
            basis = self._basis[: at + 1]
            image = self._gram @ basis[at]
            # NUMERICS: orthogonalised twice; once leaves copies of the vectors that have converged.
            first = basis @ image
            image.addmv_(basis.T, first, alpha=-1)
            second = basis @ image
            image.addmv_(basis.T, second, alpha=-1)
            self._seen[at, : at + 1] = first + second
            # A vector of zeros, where the basis holds all of its images, does no harm later.
            self._basis[at + 1] = image / image.norm().clamp_min(torch.finfo(image.dtype).tiny)
        self._size = size

    def vectors_above(self, level: float) -> Tensor:
        """Return the best approximations in the basis, the largest eigenvalue's first."""
        values, weights = torch.linalg.eigh(self._seen[: self._size, : self._size])
        return self._basis[: self._size].T @ weights[:, values > level].flip(1)


def _search(gram: Tensor, level: float) -> Tensor | None:
    """Return the vectors, or None if a basis of a quarter of the size does not hold them."""
    sizes = list(_basis_sizes(len(gram)))
    lanczos = _Lanczos(gram, sizes[-1])
    for size in sizes:
        lanczos.grow_to(size)
        vectors = lanczos.vectors_above(level)
        if _are_eigenvectors(gram, vectors, level) and _are_all(gram, vectors, level):
            return vectors
    return None


def _basis_sizes(size: int) -> Iterator[int]:
    """Yield the sizes at which to look: early for clear cases, at last a quarter of the whole."""
    tried, most = 16, size // 4
    while tried < most:
        yield tried
        tried += tried // 2
    yield most


def _are_eigenvectors(gram: Tensor, vectors: Tensor, level: float) -> bool:
    images, overlaps = gram @ vectors, vectors.T @ vectors
    values, eps = (vectors * images).sum(0), torch.finfo(gram.dtype).eps
    # NUMERICS: a vector's error is its residual over the gap to the other eigenvalues, which may be some percent of the level;
    # a residual cannot be smaller than the rounding of the largest image.
    slack = (32.0 * eps * values.norm()).clamp_min(eps**0.75 * level)
    overlaps.diagonal().sub_(1.0)
    return bool(((images - vectors * values).norm() <= slack) & (overlaps.norm() <= eps**0.75))


def _are_all(gram: Tensor, vectors: Tensor, level: float) -> bool:
    values = (vectors * (gram @ vectors)).sum(0)
    return bool(lies_below(torch.addmm(gram, vectors * values, vectors.T, alpha=-1), level))
