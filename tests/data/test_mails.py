"""The mails are the ones that were counted, and no body is on both sides of the split."""

from __future__ import annotations

import lzma
import re
from pathlib import Path

import pytest

from lowkey.data import Mail, load_mails, mails
from lowkey.errors import ConfigError

MAILS = load_mails()


def letters(mail: Mail) -> str:
    return re.sub(r"[\W\d_]+", "", mail.body.lower())


# The 6,046 mails of the npm package, counted by scripts/fetch_mails.py after near-copies were dropped.
@pytest.mark.parametrize(("split", "number", "num_spam"), [(MAILS.train, 4502, 1203), (MAILS.test, 1103, 332)], ids=["train", "test"])
def test_a_split_has_the_counted_mails(split: tuple[Mail, ...], number: int, num_spam: int) -> None:
    assert (len(split), sum(mail.is_spam for mail in split)) == (number, num_spam)


def test_no_body_is_in_both_splits() -> None:
    assert {letters(mail) for mail in MAILS.train if mail.body}.isdisjoint(letters(mail) for mail in MAILS.test if mail.body)


def test_no_body_occurs_twice() -> None:
    bodies = [letters(mail) for mail in (*MAILS.train, *MAILS.test) if letters(mail)]
    assert len(bodies) == len(set(bodies))


def test_no_header_but_the_subject_is_kept() -> None:
    leaks = [mail for mail in MAILS.train if mail.body.startswith(("Received:", "Return-Path:", "Delivered-To:", "X-Spam"))]
    # One spammer's own mailer put such lines into the text.
    assert [mail.subject for mail in leaks] == ["HELLO $NAME"]


def test_texts_are_no_longer_than_promised() -> None:
    assert max(len(mail.subject) for mail in MAILS.train) <= 120
    assert max(len(mail.body) for mail in MAILS.train) <= 2000


def test_the_first_mails_are_a_fair_sample_of_both_classes() -> None:
    first = MAILS.first(500)
    # 500 draws at a share of .267 have a standard deviation of .02; four of them.
    assert abs(sum(mail.is_spam for mail in first.train) / 500 - 1203 / 4502) < 0.08
    assert len(first.test) == 500


def test_all_mails_are_the_first_none() -> None:
    assert MAILS.first(None) == MAILS


def test_text_is_subject_then_body() -> None:
    assert Mail(subject="Hello", body="there", is_spam=False).text == "Hello\nthere"


@pytest.mark.parametrize("content", [b"not an archive", lzma.compress(b'["train", false, "", "another mail"]\n')])
def test_a_changed_file_is_refused(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / mails.FILE_NAME).write_bytes(content)
    monkeypatch.setattr(mails.resources, "files", lambda _: tmp_path)
    with pytest.raises(ConfigError, match=r"is not the file .* Reinstall lowkey"):
        load_mails()
