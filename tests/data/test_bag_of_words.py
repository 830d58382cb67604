"""The baseline is as good as a bag of words should be, and agrees with an independent one."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from lowkey.data import Mail, fit_bag_of_words, load_mails


def texts(mails: tuple[Mail, ...]) -> list[str]:
    return [mail.text for mail in mails]


def labels(mails: tuple[Mail, ...]) -> list[bool]:
    return [mail.is_spam for mail in mails]


def test_the_baseline_tells_spam_from_ham() -> None:
    mails = load_mails()
    guesses = fit_bag_of_words(texts(mails.train), labels(mails.train)).predict(texts(mails.test))
    assert np.mean(guesses == np.array(labels(mails.test))) > 0.975


@pytest.mark.parametrize("inverse_penalty", [1.0, 100.0])
def test_it_guesses_as_scikit_learn_does(inverse_penalty: float) -> None:
    mails = load_mails().first(300)
    ours = fit_bag_of_words(texts(mails.train), labels(mails.train), inverse_penalty=inverse_penalty)
    vectorizer = TfidfVectorizer(token_pattern=r"[^\W_]{2,}|[$!%]", ngram_range=(1, 2), min_df=2, sublinear_tf=True)
    theirs = LogisticRegression(C=inverse_penalty, max_iter=2000, tol=1e-8)
    theirs.fit(vectorizer.fit_transform(texts(mails.train)), labels(mails.train))
    assert sorted(ours.columns) == sorted(vectorizer.get_feature_names_out())
    # Two optimizers stop at slightly different points; the coefficients are of the order of 1.
    np.testing.assert_allclose(ours.coefficients, theirs.coef_[0], atol=0.02 * max(1.0, float(np.abs(theirs.coef_).max())))
    assert np.mean(ours.predict(texts(mails.test)) == theirs.predict(vectorizer.transform(texts(mails.test)))) >= 0.99


def test_a_text_of_unknown_words_gets_the_answer_of_the_intercept() -> None:
    model = fit_bag_of_words(["good day", "good day", "bad luck"], [False, False, True])
    assert model.predict(["", "unheard of"]).tolist() == [model.intercept > 0] * 2
