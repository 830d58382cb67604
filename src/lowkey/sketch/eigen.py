"""The leading directions of public gradients: the top eigenspace of their uncentred second moment.

Axes: M and N public examples, K directions, W entries of a parameter

With one gradient per row of `G` (M x all coordinates), the second moment is `G^T G / M`, and its eigenvectors follow from the M x M
Gram matrix: `G G^T = U diag(l) U^T` gives them as the rows of `diag(l)^(-1/2) U^T G`.
So the eigenspace is exact, and no iteration over all coordinates is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lowkey.errors import ConfigError
from lowkey.factors import wide_dtype

GradientStream = Callable[[], Iterator[Mapping[str, Tensor]]]
"""Starts over the same public gradients whenever it is called: `(examples, *shape)` by parameter, a few examples at a time."""

_Chunk = Mapping[str, Tensor]

_HELD_NUMBERS = 1 << 28
"""Gradients are held as long as they are at most this many numbers, which are 1 GiB in float32."""

_PART_NUMBERS = 1 << 22
"""Temporaries in float64 hold about this many numbers."""


def leading_directions(gradients: GradientStream, groups: Iterable[Sequence[str]], rank: int) -> dict[str, Tensor]:
    """Return an orthonormal basis of each group's leading `rank` directions, as every parameter's part of it.

    Args:
        gradients: The public examples' gradients.
        groups: Parameters whose coordinates are laid side by side; one group of all for a subspace of the whole parameter vector.
        rank: How many directions a group has. Those beyond the rank of its gradients are exactly zero.

    Returns:
        For each parameter, `(rank, *shape)`. Over a group, the rows that are not zero are orthonormal, the strongest first.

    Raises:
        ConfigError: If a public gradient is not finite.

    Guarantee:
        A function of public gradients, and so of public examples and of weights, which are functions of releases.
        The eigenspace is exact up to rounding: about 1e-16 times the largest eigenvalue over the gap behind the last one that is kept, for
        the gradients as they are given.
        A direction counts as null where its eigenvalue is no more than the rounding of the matrix or of the gradients.

    Assumes:
        Where several passes are needed, the gradients are the same in each. A model with dropout on gives others every time, and then a
        basis that is still public and still orthonormal, and no longer exact.

    Cost:
        `O(M^2)` inner products of gradients, in float64.
        Where the gradients are more than 2^28 numbers, those of `held = max(rank, 2^28 / coordinates)` examples are held at a time and
        multiplied with all later ones as they stream by: `ceil(M / held) + 1` passes in place of one, and the same result.
        Memory is then that of the held gradients, of one chunk, and in the last pass of the basis.

    Example:
        >>> stream = lambda: iter([{"w": torch.tensor([[3.0, 0.0], [0.0, 1.0]])}, {"w": torch.tensor([[2.0, 0.0]])}])
        >>> leading_directions(stream, [["w"]], rank=1)["w"].abs()
        tensor([[1., 0.]])
    """
    groups = [tuple(group) for group in groups]
    found = _gram_matrices(gradients, groups, rank)
    mixing = [_mixing(matrix, rank, found.precision) for matrix in found.matrices]
    basis = _mixed(gradients() if found.held is None else found.held, groups, mixing)
    for group in groups:
        _orthonormalise([basis[name] for name in group])
    return basis


@dataclass(frozen=True, kw_only=True)
class _Grams:
    """The Gram matrix of each group.

    Fields:
        matrices: In float64.
        held: All the gradients, if they could be held.
        precision: The rounding of the gradients, relative to their size.
    """

    matrices: Sequence[Tensor]
    held: Sequence[_Chunk] | None
    precision: float


def _gram_matrices(gradients: GradientStream, groups: Sequence[Sequence[str]], rank: int) -> _Grams:
    held, bands = _band(gradients, groups, rank, 0)
    precision = torch.finfo(wide_dtype(held[0][groups[0][0]].dtype)).eps
    done, num_examples = bands[0].shape
    if done == num_examples:
        return _Grams(matrices=bands, held=held, precision=precision)
    held = None
    matrices = [band.new_zeros(num_examples, num_examples) for band in bands]
    while True:
        for matrix, band in zip(matrices, bands, strict=True):
            start = num_examples - band.shape[1]
            matrix[start:done, start:], matrix[start:, start:done] = band, band.T
        if done == num_examples:
            return _Grams(matrices=matrices, held=None, precision=precision)
        bands = _band(gradients, groups, rank, done)[1]
        done += len(bands[0])


def _band(gradients: GradientStream, groups: Sequence[Sequence[str]], rank: int, start: int) -> tuple[list[_Chunk], list[Tensor]]:
    """Hold some examples from `start` on, and return them with their products with themselves and all later ones."""
    held: list[_Chunk] = []
    later: list[list[Tensor]] = [[] for _ in groups]
    seen = count = 0
    for chunk in gradients():
        skipped, seen = max(0, start - seen), seen + _length(chunk)
        chunk = _cut(chunk, slice(skipped, None))
        kept = _cut(chunk, slice(0, max(rank, _HELD_NUMBERS // _width(chunk)) - count))
        rest = _cut(chunk, slice(_length(kept), None))
        if _length(kept):
            held.append(kept)
            count += _length(kept)
        if _length(rest):
            for products, group in zip(later, groups, strict=True):
                products.append(torch.cat([_gram(part, rest, group) for part in held]))
    own = [torch.cat([torch.cat([_gram(a, b, group) for b in held], 1) for a in held]) for group in groups]
    return held, [torch.cat([first, *products], 1) for first, products in zip(own, later, strict=True)]


def _gram(first: _Chunk, second: _Chunk, names: Sequence[str]) -> Float[Tensor, "M N"]:
    """Return the inner products of two chunks' gradients over some parameters."""
    anything = first[names[0]]
    found = torch.zeros(_length(first), _length(second), dtype=torch.float64, device=anything.device)
    for name in names:
        left, right = _flat(first[name]), _flat(second[name])
        for part in _parts(left.shape[1], left.shape[0] + right.shape[0]):
            # NUMERICS: a Gram matrix squares the condition number, so float32 would lose every direction 1e-4 below the strongest.
            found.addmm_(left[:, part].double(), right[:, part].double().T)
    return found


def _mixing(gram: Float[Tensor, "M M"], rank: int, precision: float) -> Float[Tensor, "K M"]:
    """Return the weights with which gradients add up to unit directions; zero for a direction that they do not have."""
    if not bool(torch.isfinite(gram).all()):
        raise ConfigError(
            "a public example has a gradient that is not finite. Its directions are those that training is confined to. "
            "Leave out public examples whose loss is infinite or NaN; if all are, training has diverged, so lower the learning rate."
        )
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(0)[:rank], vectors.flip(1)[:, :rank]
    # NUMERICS: a smaller eigenvalue is rounding, of the matrix or of the gradients, and its direction would be that of the rounding.
    noise = max(8.0 * len(gram) * torch.finfo(torch.float64).eps, (8.0 * precision) ** 2)
    tiny = torch.finfo(torch.float64).tiny
    is_null = values <= noise * values[0].clamp_min(tiny)
    mixing = gram.new_zeros(rank, len(gram))
    mixing[: len(values)] = (vectors / values.clamp_min(tiny).sqrt()).masked_fill(is_null, 0.0).T
    return mixing


def _mixed(chunks: Iterable[_Chunk], groups: Sequence[Sequence[str]], mixing: Sequence[Tensor]) -> dict[str, Tensor]:
    """Add up gradients with the weights of their group."""
    basis: dict[str, Tensor] = {}
    seen = 0
    for chunk in chunks:
        rows = slice(seen, seen + _length(chunk))
        seen = rows.stop
        for group, weights in zip(groups, mixing, strict=True):
            for name in group:
                value = chunk[name]
                total = basis.setdefault(name, value.new_zeros(len(weights), *value.shape[1:], dtype=wide_dtype(value.dtype)))
                _add_mixed(total, weights[:, rows], value)
    return basis


def _add_mixed(total: Tensor, weights: Tensor, value: Tensor) -> None:
    flat, gradients = total.view(len(total), -1), _flat(value)
    for part in _parts(gradients.shape[1], len(total) + len(value)):
        flat[:, part] += (weights @ gradients[:, part].double()).to(flat.dtype)


def overlap(parts: Sequence[Float[Tensor, "K ..."]]) -> Float[Tensor, "K K"]:
    """Return the inner products of directions with each other in float64, given every parameter's part of them."""
    chunk = {str(number): part for number, part in enumerate(parts)}
    return _gram(chunk, chunk, list(chunk))


def _orthonormalise(parts: Sequence[Tensor]) -> None:
    """Take out of the rows, in place, what rounding has left between them."""
    flats = [part.view(len(part), -1) for part in parts]
    products = overlap(parts)
    rank = int((products.diagonal() > 0).sum())
    if rank == 0:
        return
    values, vectors = torch.linalg.eigh(products[:rank, :rank])
    # NUMERICS: of all orthonormal rows these are the nearest ones, so what is already orthonormal stays.
    correction = (vectors * values.clamp_min(torch.finfo(torch.float64).eps).rsqrt()) @ vectors.T
    for flat in flats:
        for part in _parts(flat.shape[1], len(flat)):
            flat[:rank, part] = (correction @ flat[:rank, part].double()).to(flat.dtype)


def _length(chunk: _Chunk) -> int:
    return len(next(iter(chunk.values())))


def _width(chunk: _Chunk) -> int:
    return sum(value[0].numel() for value in chunk.values()) if _length(chunk) else 1


def _cut(chunk: _Chunk, rows: slice) -> _Chunk:
    return {name: value[rows] for name, value in chunk.items()}


def _flat(value: Tensor) -> Float[Tensor, "M W"]:
    return value.reshape(len(value), -1)


def _parts(count: int, elements_each: int) -> list[slice]:
    width = max(1, _PART_NUMBERS // max(1, elements_each))
    return [slice(start, start + width) for start in range(0, count, width)]
