"""What single words become; the distribution of many is in tests/statistical."""

from __future__ import annotations

import math
from decimal import Decimal, getcontext

import numpy as np
import pytest
from numpy.typing import NDArray

from lowkey.release.box_muller import TILE, Real, normals, num_words

ALL_ONES = (1 << 64) - 1
PAIRS = TILE // 2
PRECISION: dict[Real, float] = {np.float32: 5e-7, np.float64: 2e-15}

both_dtypes = pytest.mark.parametrize("dtype", [np.float32, np.float64])


def random_words(count: int, dtype: Real, seed: int = 0) -> NDArray[np.uint64]:
    return np.random.default_rng(seed).integers(0, ALL_ONES, num_words(count, dtype), dtype=np.uint64, endpoint=True)


def split(words: NDArray[np.uint64], dtype: Real) -> tuple[list[int], list[int]]:
    """The integers of the radii and of the angles of one tile, in the order of its pairs."""
    angles = words[PAIRS:].view(np.int32 if dtype is np.float32 else np.int64)
    return [int(word) for word in words[:PAIRS]], [int(angle) for angle in angles]


def expected(words: NDArray[np.uint64], dtype: Real) -> NDArray[np.float64]:
    """The formula of Box and Muller on exact integers; the logarithm in 40 digits."""
    getcontext().prec = 40
    radii, angles = split(words, dtype)
    bits = 31 if dtype is np.float32 else 63
    rows: list[tuple[float, float]] = []
    for radius, angle in zip(radii, angles, strict=True):
        uniform = Decimal(radius % 2**63 + 1) / Decimal(2**63)
        length = float((-2 * uniform.ln()).sqrt())
        rows.append((length * math.cos(math.pi * angle / 2**bits), length * math.sin(math.pi * angle / 2**bits)))
    return np.array(rows).T.reshape(-1)


@both_dtypes
def test_numbers_follow_the_formula_to_the_stated_precision(dtype: Real) -> None:
    words = random_words(TILE, dtype)
    exact = expected(words, dtype)
    radii = np.tile(np.hypot(*exact.reshape(2, -1)), 2)
    assert (np.abs(normals(words, 1.0, dtype) - exact) <= PRECISION[dtype] * (radii + 1 / radii)).all()


@both_dtypes
@pytest.mark.parametrize("word", [0, 1, 2, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 63) + 1, ALL_ONES - 1, ALL_ONES])
def test_no_word_gives_infinity_or_nan(dtype: Real, word: int) -> None:
    words = np.full(num_words(1, dtype), word, np.uint64)
    numbers = normals(words, 1.0, dtype)
    assert np.isfinite(numbers).all()
    assert np.abs(numbers).max() <= math.sqrt(2 * 63 * math.log(2)) * (1 + PRECISION[dtype])


@both_dtypes
def test_the_tail_tells_the_smallest_words_apart(dtype: Real) -> None:
    words = np.zeros(num_words(1, dtype), np.uint64)
    words[:PAIRS] = np.arange(PAIRS)
    steps = np.diff(normals(words, 1.0, dtype)[:PAIRS])
    assert (steps < 0).all()


@both_dtypes
def test_small_radii_stay_apart_and_are_not_zero(dtype: Real) -> None:
    words = np.zeros(num_words(1, dtype), np.uint64)
    # Uniforms of 1 - j 2^-40: float32 rounds all of them to one, whose logarithm is zero.
    words[:PAIRS] = np.array([(1 << 63) - 1 - (j << 23) for j in range(1, PAIRS + 1)], np.uint64)
    radii = normals(words, 1.0, dtype)[:PAIRS]
    assert np.allclose(radii, np.sqrt(2 * np.arange(1, PAIRS + 1) * 2.0**-40), rtol=1e-4)


@both_dtypes
def test_every_bit_of_an_angle_turns_its_own_pair_alone(dtype: Real) -> None:
    words = random_words(TILE, dtype)
    before = normals(words, 1.0, dtype).reshape(2, PAIRS).astype(np.float64)
    words[PAIRS] ^= np.uint64(1 << 31)
    after = normals(words, 1.0, dtype).reshape(2, PAIRS).astype(np.float64)
    assert np.allclose(np.hypot(*before), np.hypot(*after), rtol=1e-6)
    assert np.flatnonzero((before != after).any(0)).tolist() == [0]


@both_dtypes
def test_a_word_of_a_radius_moves_its_own_pair_alone_and_leaves_its_angle(dtype: Real) -> None:
    words = random_words(TILE, dtype)
    before = normals(words, 1.0, dtype).reshape(2, PAIRS).astype(np.float64)
    words[7] ^= np.uint64(1 << 62)
    after = normals(words, 1.0, dtype).reshape(2, PAIRS).astype(np.float64)
    assert np.flatnonzero((before != after).any(0)).tolist() == [7]
    assert math.isclose(math.atan2(*before[:, 7]), math.atan2(*after[:, 7]), rel_tol=1e-5)


@both_dtypes
def test_each_pair_has_words_of_its_own(dtype: Real) -> None:
    words = random_words(2 * TILE, dtype)
    before = normals(words, 1.0, dtype)
    touched: list[int] = []
    for place in range(len(words)):
        changed = words.copy()
        changed[place] ^= np.uint64(1 << 61 | 1 << 30)
        touched.append(int((normals(changed, 1.0, dtype) != before).sum()))
    # A word makes one pair; the angles of two pairs share a word in float32, and no bit of it.
    assert set(touched) == ({2, 4} if dtype is np.float32 else {2})
    assert sum(touched) == 2 * 2 * TILE


@both_dtypes
@pytest.mark.parametrize("count", [1, TILE - 1, TILE, TILE + 1])
def test_a_longer_draw_begins_with_the_words_of_a_shorter_one(dtype: Real, count: int) -> None:
    words = random_words(4 * TILE, dtype)
    short, long = normals(words[: num_words(count, dtype)], 1.0, dtype), normals(words, 1.0, dtype)
    assert np.array_equal(short[:count], long[:count])


@both_dtypes
def test_the_dtype_is_the_asked_one_and_the_words_are_left_alone(dtype: Real) -> None:
    words = random_words(TILE, dtype)
    copy = words.copy()
    assert normals(words, 2.5, dtype).dtype == dtype
    assert np.array_equal(words, copy)
