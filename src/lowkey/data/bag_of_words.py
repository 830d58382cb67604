"""A bag-of-words classifier without any privacy: the yardstick that a private model is held against."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Bool, Float
from scipy.optimize import minimize
from scipy.sparse import csr_matrix
from scipy.special import expit

_WORD = re.compile(r"[^\W_]{2,}|[$!%]")


@dataclass(frozen=True, kw_only=True)
class BagOfWords:
    """Logistic regression on TF-IDF weights.

    Fields:
        columns: Column of each known word or pair of words.
        idf: Weight of each column.
        coefficients: One per column.
        intercept: Log-odds of an empty text.

    Guarantee:
        None (epsilon is infinite): vocabulary, weights and coefficients are read off the training texts.
    """

    columns: Mapping[str, int]
    idf: Float[np.ndarray, " V"]
    coefficients: Float[np.ndarray, " V"]
    intercept: float

    def predict(self, texts: Sequence[str]) -> Bool[np.ndarray, " N"]:
        """Return whether each text belongs to the positive class."""
        features = _weigh([_count_terms(text) for text in texts], self.columns, self.idf)
        return features @ self.coefficients + self.intercept > 0


def fit_bag_of_words(texts: Sequence[str], labels: Sequence[bool], *, inverse_penalty: float = 1000.0, min_texts: int = 2) -> BagOfWords:
    """Fit logistic regression on the TF-IDF weights of words and pairs of neighbouring words.

    Args:
        texts: Training texts.
        labels: Class of each text.
        inverse_penalty: Weight of the likelihood against half the squared coefficients.
        min_texts: Terms in fewer texts than this are left out.

    Returns:
        The fitted classifier.

    Guarantee:
        None (epsilon is infinite).

    Cost:
        A few seconds for a few thousand short texts.

    Example:
        >>> model = fit_bag_of_words(["cheap pills", "see you", "cheap loans", "see this"], [True, False, True, False], min_texts=1)
        >>> model.predict(["cheap"]).tolist()
        [True]
    """
    counts = [_count_terms(text) for text in texts]
    num_texts_with = Counter(term for count in counts for term in count)
    kept = sorted(term for term, number in num_texts_with.items() if number >= min_texts)
    columns = {term: column for column, term in enumerate(kept)}
    idf = 1.0 + np.log((1 + len(texts)) / (1 + np.array([num_texts_with[term] for term in kept], dtype=np.float64)))
    coefficients, intercept = _fit_logistic(_weigh(counts, columns, idf), np.asarray(labels, dtype=bool), inverse_penalty)
    return BagOfWords(columns=columns, idf=idf, coefficients=coefficients, intercept=intercept)


def _count_terms(text: str) -> Counter[str]:
    words = _WORD.findall(text.lower())
    return Counter(words) + Counter(f"{first} {second}" for first, second in pairwise(words))


def _weigh(counts: Sequence[Counter[str]], columns: Mapping[str, int], idf: Float[np.ndarray, " V"]) -> csr_matrix:
    """Return one row of unit length per text: `(1 + log count) * idf` for every known term."""
    rows, cols, values = list[int](), list[int](), list[float]()
    for row, count in enumerate(counts):
        known = {columns[term]: number for term, number in count.items() if term in columns}
        weights = (1.0 + np.log(np.array(list(known.values()), dtype=np.float64))) * idf[list(known)]
        length = float(np.sqrt(weights @ weights)) or 1.0
        rows += [row] * len(known)
        cols += list(known)
        values += (weights / length).tolist()
    return csr_matrix((values, (rows, cols)), shape=(len(counts), len(columns)))


def _fit_logistic(features: csr_matrix, labels: Bool[np.ndarray, " N"], inverse_penalty: float) -> tuple[Float[np.ndarray, " V"], float]:
    signs = np.where(labels, 1.0, -1.0)

    def objective(weights: Float[np.ndarray, " W"]) -> tuple[float, Float[np.ndarray, " W"]]:
        margins = signs * (features @ weights[:-1] + weights[-1])
        slopes = -inverse_penalty * signs * expit(-margins)
        value = inverse_penalty * np.logaddexp(0.0, -margins).sum() + 0.5 * float(weights[:-1] @ weights[:-1])
        return value, np.append(features.T @ slopes + weights[:-1], slopes.sum())

    found = minimize(objective, np.zeros((features.T @ signs).size + 1), jac=True, method="L-BFGS-B", options={"maxiter": 300})
    return found.x[:-1], float(found.x[-1])
