"""Per-example gradients in factored form, and the three things a release asks of them.

    Axes: B examples, T positions, R rows, C columns of the parameter seen as a matrix

Example `b` of a matrix parameter has the gradient `sum_t rows[b, t] cols[b, t]^T`.
Clipping needs only its norm, and the release only a weighted sum over examples, so the `B x R x C` tensor is never built
unless it is the smaller of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

_HALF_POSITIONS = 32
_CHUNK_ELEMENTS = 1 << 24
"""Temporaries over a batch are cut so that they hold about this many numbers."""


def widen(tensor: Tensor) -> Tensor:
    """Return `tensor` in a dtype that sums may be taken in."""
    # NUMERICS: bfloat16 keeps 8 bits; norms taken in it overshoot the bound by .25 %.
    return tensor.to(wide_dtype(tensor.dtype))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which norms, sums and noise of a parameter of `dtype` are held."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class OneHot:
    """Rows of an identity matrix, by index: what an embedding's input is."""

    index: Int[Tensor, "B T"]
    size: int

    def __matmul__(self, basis: Tensor) -> Tensor:
        return basis[self.index]


Side = Tensor | OneHot
"""One of an outer product's two sides: `(B, T, width)` numbers, or indices."""


class Factor(Protocol):
    """Per-example gradients of one block of coordinates, in some form."""

    @property
    def numel(self) -> int:
        """How many numbers this form holds."""
        ...

    def squared_norms(self) -> Float[Tensor, " B"]:
        """Bound each example's squared Frobenius norm from above, tight up to rounding."""
        ...

    def add_sum(self, total: Tensor, weights: Float[Tensor, " B"]) -> None:
        """Add `sum_b weights[b] * gradient_b` to `total`."""
        ...

    def dense(self) -> Tensor:
        """Return the gradients as one `(B, *shape)` tensor."""
        ...

    def without(self, bad: Bool[Tensor, " B"]) -> Factor:
        """Return a copy in which the `bad` examples are exactly zero."""
        ...


@dataclass(frozen=True)
class Dense:
    """Gradients that are small enough to hold: `(B, *shape)`."""

    value: Tensor

    @property
    def numel(self) -> int:
        return self.value.numel()

    def squared_norms(self) -> Float[Tensor, " B"]:
        flat = widen(self.value).reshape(self.value.shape[0], -1)
        # One pass over memory, where a product with itself takes two.
        return torch.linalg.vector_norm(flat, dim=1).square()

    def add_sum(self, total: Tensor, weights: Float[Tensor, " B"]) -> None:
        flat = self.value.to(total.dtype).reshape(self.value.shape[0], -1)
        total.view(-1).addmv_(flat.T, weights)

    def dense(self) -> Tensor:
        return self.value

    def without(self, bad: Bool[Tensor, " B"]) -> Dense:
        return Dense(self.value.masked_fill(bad.view(-1, *[1] * (self.value.dim() - 1)), 0.0))


@dataclass(frozen=True)
class Outer:
    """Gradients `sum_t rows_t cols_t^T` of a parameter seen as an R x C matrix.

    `shape` is the block's own shape, of which the matrix is a view.
    """

    rows: Side
    cols: Side
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return _side_numel(self.rows) + _side_numel(self.cols)

    @property
    def num_positions(self) -> int:
        return (self.rows.index if isinstance(self.rows, OneHot) else self.rows).shape[1]

    def squared_norms(self) -> Float[Tensor, " B"]:
        return gram_squared_norms([self])

    def add_sum(self, total: Tensor, weights: Float[Tensor, " B"]) -> None:
        add_outer_sum(total.view(_width(self.rows), _width(self.cols)), self.rows, self.cols, weights)

    def times(self, basis: Tensor, shape: tuple[int, ...]) -> Outer:
        """Multiply the side of the columns."""
        return Outer(self.rows, _times(self.cols, basis), shape)

    def times_from_left(self, basis: Tensor, shape: tuple[int, ...]) -> Outer:
        """Multiply the side of the rows."""
        return Outer(_times(self.rows, basis), self.cols, shape)

    def compacted(self) -> Factor:
        """Return plain gradients where those are smaller."""
        is_smaller = _width(self.rows) * _width(self.cols) * _batch(self.rows) <= self.numel
        return Dense(self.dense()) if is_smaller else self

    def dense(self) -> Tensor:
        batch = _batch(self.rows)
        if isinstance(self.rows, OneHot) or isinstance(self.cols, OneHot):
            matrices = self.rows_dense().new_zeros(batch, _width(self.rows), _width(self.cols))
            one = matrices.new_ones(1)
            for b in range(batch):
                add_outer_sum(matrices[b], _pick(self.rows, b), _pick(self.cols, b), one)
            return matrices.view(batch, *self.shape)
        matrices = widen(self.rows).transpose(1, 2) @ widen(self.cols)
        return matrices.reshape(batch, *self.shape)

    def rows_dense(self) -> Tensor:
        """Return whichever side holds numbers."""
        side = self.cols if isinstance(self.rows, OneHot) else self.rows
        if isinstance(side, OneHot):
            raise TypeError("an outer product of two indices is not a gradient")
        return widen(side)

    def without(self, bad: Bool[Tensor, " B"]) -> Outer:
        return Outer(_blank(self.rows, bad), _blank(self.cols, bad), self.shape)


@dataclass(frozen=True)
class Union:
    """The sum of several outer products per example: a weight that the forward pass used more than once.

    Guarantee:
        The norm is that of the sum of all uses, cross terms included.
    """

    parts: tuple[Outer, ...]

    @property
    def numel(self) -> int:
        return sum(part.numel for part in self.parts)

    def squared_norms(self) -> Float[Tensor, " B"]:
        # PRIVACY: tied weights are one coordinate; the norm must be that of the summed gradient, not of each use.
        return gram_squared_norms(self.parts)

    def add_sum(self, total: Tensor, weights: Float[Tensor, " B"]) -> None:
        for part in self.parts:
            part.add_sum(total, weights)

    def dense(self) -> Tensor:
        return torch.stack([part.dense() for part in self.parts]).sum(0)

    def without(self, bad: Bool[Tensor, " B"]) -> Union:
        return Union(tuple(part.without(bad) for part in self.parts))


def combine(factors: Sequence[Factor]) -> Factor:
    """Merge every use of one block into a single factor."""
    if len(factors) == 1:
        return factors[0]
    outers = [factor for factor in factors if isinstance(factor, Outer)]
    if len(outers) < len(factors):
        return Dense(torch.stack([widen(factor.dense()) for factor in factors]).sum(0))
    first = outers[0]
    if all(not isinstance(side, OneHot) for outer in outers for side in (outer.rows, outer.cols)):
        rows = torch.cat([outer.rows for outer in outers if isinstance(outer.rows, Tensor)], dim=1)
        cols = torch.cat([outer.cols for outer in outers if isinstance(outer.cols, Tensor)], dim=1)
        return Outer(rows, cols, first.shape)
    return Union(tuple(outers))


def gram_squared_norms(parts: Sequence[Outer]) -> Float[Tensor, " B"]:
    """Bound the squared norms of `sum_parts sum_t rows_t cols_t^T` without building the matrices.

    The square is `sum_{s,t} <rows_s, rows_t> <cols_s, cols_t>`.

    Guarantee:
        Never below the exact value for the given factors: what rounding and underflow can take away is added back.
    """
    parts = [half for part in parts for half in _halves(part)]
    batch = _batch(parts[0].rows)
    positions = sum(part.num_positions for part in parts)
    width = max(1, _CHUNK_ELEMENTS // max(1, positions * positions))
    if width >= batch:
        return _gram_chunk(parts)
    chunks = [slice(start, start + width) for start in range(0, batch, width)]
    return torch.cat([_gram_chunk([_cut(part, chunk) for part in parts]) for chunk in chunks])


def _halves(part: Outer) -> list[Outer]:
    """Cut many positions in two: a Gram matrix is symmetric, and of four blocks three are enough."""
    middle = part.num_positions // 2
    if middle < _HALF_POSITIONS:
        return [part]

    def half(side: Side, positions: slice) -> Side:
        return OneHot(side.index[:, positions], side.size) if isinstance(side, OneHot) else side[:, positions]

    cuts = (slice(None, middle), slice(middle, None))
    return [Outer(half(part.rows, cut), half(part.cols, cut), part.shape) for cut in cuts]


def _gram_chunk(parts: Sequence[Outer]) -> Float[Tensor, " B"]:
    squares: Tensor | None = None
    lengths: Tensor | None = None
    lost: Tensor | None = None
    for i, left in enumerate(parts):
        for j, right in enumerate(parts[: i + 1]):
            gram_rows = _gram(left.rows, right.rows)
            gram_cols = gram_rows if left.cols is left.rows and i == j else _gram(left.cols, right.cols)
            gram_rows, gram_cols = _same_dtype(gram_rows, gram_cols)
            if i == j:
                norms, below = _diagonal_lengths(gram_rows, gram_cols, _width(left.rows), _width(left.cols))
                lengths = norms if lengths is None else lengths + norms
                lost = below if lost is None else lost + below
            term = torch.linalg.vecdot(gram_rows.flatten(1), gram_cols.flatten(1)) * (1.0 if i == j else 2.0)
            squares = term if squares is None else squares + term
    if squares is None or lengths is None or lost is None:
        raise ValueError("gram_squared_norms was given no parts. A norm needs at least one use of the parameter. Pass every recorded use.")
    return _with_margin(squares, lengths, lost)


def squared_norms_of(gram_rows: Float[Tensor, "B T T"], gram_cols: Float[Tensor, "B T T"], shape: tuple[int, int]) -> Float[Tensor, " B"]:
    """Bound the squared norms of `sum_t rows_t cols_t^T`, an R x C matrix of `shape`, by the Gram matrices of both sides.

    Guarantee:
        As for `gram_squared_norms`.
    """
    squares = torch.linalg.vecdot(gram_rows.flatten(1), gram_cols.flatten(1))
    return _with_margin(squares, *_diagonal_lengths(gram_rows, gram_cols, *shape))


def _with_margin(squares: Tensor, lengths: Tensor, lost: Tensor) -> Float[Tensor, " B"]:
    # PRIVACY: terms of opposite sign cancel, and rounding may leave less than the true norm; the margin can only clip more.
    return squares.clamp_min(0.0) + 8.0 * torch.finfo(squares.dtype).eps * lengths.square() + lost.square()


def _diagonal_lengths(gram_rows: Tensor, gram_cols: Tensor, rows: int, cols: int) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """Return `sum_t |rows_t| |cols_t|`, the largest norm that the products could have summed to, and the part that underflow may hide."""
    row_lengths, col_lengths = (gram.diagonal(dim1=1, dim2=2).clamp_min(0.0).sqrt() for gram in (gram_rows, gram_cols))
    tiny = torch.finfo(gram_rows.dtype).tiny
    # PRIVACY: squares below the smallest normal number vanish; beside a huge other side, what they stand for is no longer small.
    lost = (rows * tiny) ** 0.5 * col_lengths + (cols * tiny) ** 0.5 * row_lengths
    return (row_lengths * col_lengths).sum(1), lost.sum(1)


def _gram(left: Side, right: Side) -> Shaped[Tensor, "B S T"]:
    if isinstance(left, OneHot) and isinstance(right, OneHot):
        return left.index[:, :, None] == right.index[:, None, :]
    if isinstance(left, OneHot) and isinstance(right, Tensor):
        return _gather(widen(right), left.index)
    if isinstance(left, Tensor) and isinstance(right, OneHot):
        return _gather(widen(left), right.index).transpose(1, 2)
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return widen(left) @ widen(right).transpose(1, 2)
    raise TypeError("a side of an outer product is a Tensor or a OneHot")


def _same_dtype(rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
    """Turn a Gram matrix of indices, which is boolean, into numbers like the other's."""
    return (rows.to(cols.dtype), cols) if rows.dtype == torch.bool else (rows, cols.to(rows.dtype))


def _gather(values_BTW: Tensor, index_BS: Tensor) -> Float[Tensor, "B S T"]:
    index = index_BS[:, None, :].expand(-1, values_BTW.shape[1], -1)
    return values_BTW.gather(2, index).transpose(1, 2)


def add_outer_sum(total: Float[Tensor, "R C"], rows: Side, cols: Side, weights: Float[Tensor, " B"]) -> None:
    """Add `sum_b weights_b sum_t rows_bt cols_bt^T` to the matrix `total`, in place."""
    if isinstance(rows, OneHot) and isinstance(cols, Tensor):
        total.index_add_(0, rows.index.flatten(), (cols.to(total.dtype) * weights[:, None, None]).flatten(0, 1))
    elif isinstance(rows, Tensor) and isinstance(cols, OneHot):
        total.T.index_add_(0, cols.index.flatten(), (rows.to(total.dtype) * weights[:, None, None]).flatten(0, 1))
    elif isinstance(rows, Tensor) and isinstance(cols, Tensor):
        rows, cols = rows.to(total.dtype), cols.to(total.dtype)
        # The thinner side is the cheaper one to scale.
        if rows.shape[2] <= cols.shape[2]:
            rows = rows * weights[:, None, None]
        else:
            cols = cols * weights[:, None, None]
        total.addmm_(rows.flatten(0, 1).T, cols.flatten(0, 1))
    else:
        raise TypeError("an outer product of two indices is not a gradient")


def _times(side: Side, basis: Tensor) -> Tensor:
    """Multiply each position by the basis, in the precision of the side where it has one."""
    return side @ (basis if isinstance(side, OneHot) else basis.to(side.dtype))


def _width(side: Side) -> int:
    return side.size if isinstance(side, OneHot) else side.shape[2]


def _batch(side: Side) -> int:
    return side.index.shape[0] if isinstance(side, OneHot) else side.shape[0]


def _side_numel(side: Side) -> int:
    return side.index.numel() if isinstance(side, OneHot) else side.numel()


def _pick(side: Side, b: int) -> Side:
    return OneHot(side.index[b : b + 1], side.size) if isinstance(side, OneHot) else side[b : b + 1]


def _cut(part: Outer, chunk: slice) -> Outer:
    def cut(side: Side) -> Side:
        return OneHot(side.index[chunk], side.size) if isinstance(side, OneHot) else side[chunk]

    return Outer(cut(part.rows), cut(part.cols), part.shape)


def _blank(side: Side, bad: Bool[Tensor, " B"]) -> Side:
    return side if isinstance(side, OneHot) else side.masked_fill(bad[:, None, None], 0.0)
