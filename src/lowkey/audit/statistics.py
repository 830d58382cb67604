"""Tests of noise, each with an exact or conservative p-value."""

from __future__ import annotations

import functools
import importlib
import math
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

ALPHA = 1e-6
"""The chance that an audit of a right mechanism reports its noise as wrong."""

Numbers = NDArray[np.float64]


@functools.cache
def distributions() -> ModuleType:
    """Import scipy's distributions when an audit first needs them: they take longer to load than all of lowkey."""
    return importlib.import_module("scipy.stats")


def scale_p_value(sum_of_squares: float, count: int) -> float:
    """Return the two-sided p-value of a sum of squares of `count` standard normals."""
    if not math.isfinite(sum_of_squares):
        return 0.0
    return float(min(1.0, 2.0 * min(distributions().chi2.cdf(sum_of_squares, count), distributions().chi2.sf(sum_of_squares, count))))


def scale_interval(sum_of_squares: float, count: int, alpha: float) -> tuple[float, float]:
    """Return the interval that holds the standard deviation, as a multiple of the claimed one, but for a chance of `alpha`."""
    low, high = distributions().chi2.ppf([alpha / 2, 1 - alpha / 2], count)
    return math.sqrt(sum_of_squares / high), math.sqrt(sum_of_squares / low)


def mean_p_value(total: float, count: int) -> float:
    """Return the two-sided p-value of a sum of `count` standard normals."""
    return normal_p_value(total / math.sqrt(count))


def normal_p_value(z: float) -> float:
    """Return the two-sided p-value of one standard normal."""
    return float(2.0 * distributions().norm.sf(abs(z))) if math.isfinite(z) else 0.0


def shape_p_value(sample: Numbers) -> float:
    """Return the Kolmogorov-Smirnov p-value against the normal law of the sample's own scale.

    The scale is tested elsewhere; fitting it here only makes this test more forgiving.
    """
    return float(distributions().kstest(sample / math.sqrt(float(np.mean(sample**2))), "norm").pvalue)


def largest_correlation(rows: Numbers, others: Numbers | None = None) -> tuple[float, int, tuple[int, int]]:
    """Find the pair of vectors that agree the most.

    Given one vector, its product with independent standard normals is exactly normal with its length as standard deviation.

    Args:
        rows: One vector per row; of two vectors of unequal length the shorter ends in zeros.
        others: What to compare with; None compares the rows with each other.

    Returns:
        The largest standard score, how many pairs were compared, and which pair it was.
    """
    left = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-300)
    scores = np.abs(left @ (rows if others is None else others).T)
    if others is None:
        # Either vector may be the given one; the smaller score of the two is the more forgiving.
        scores = np.triu(np.minimum(scores, scores.T), 1)
    pairs = len(rows) * (len(rows) - 1) // 2 if others is None else scores.size
    if pairs == 0:
        return 0.0, 0, (0, 0)
    first, second = np.unravel_index(int(np.argmax(scores)), scores.shape)
    return float(scores[first, second]), pairs, (int(first), int(second))


def lag_score(rows: Numbers, lag: int) -> float:
    """Return the standard score of the products of each row with the one `lag` rows later."""
    if lag <= 0 or len(rows) <= lag:
        return 0.0
    early, late = rows[:-lag], rows[lag:]
    return float(np.sum(early * late) / max(np.linalg.norm(early), 1e-300))
