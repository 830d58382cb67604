"""The script that rebuilds the mails reads mails as people do."""

from __future__ import annotations

import io
import json
import tarfile
from email.message import EmailMessage
from pathlib import Path

import pytest

from scripts import fetch_mails


def html_mail() -> bytes:
    message = EmailMessage()
    message["Subject"] = "Caf\u00e9 offer"
    message["Received"] = "from a relay that gives the label away"
    message.set_content("<html><head><title>no</title></head><!-- no --><p>Buy&nbsp;it <b>now</b></p></html>", subtype="html")
    return message.as_bytes()


def two_part_mail() -> bytes:
    message = EmailMessage()
    message["Subject"] = "Notes"
    message.set_content("the plain text", cte="base64")
    message.add_alternative("<p>the same with mark-up</p>", subtype="html")
    return message.as_bytes()


@pytest.mark.parametrize(
    ("raw", "subject", "body"),
    [
        (html_mail(), "Caf\u00e9 offer", "Buy it now"),
        (two_part_mail(), "Notes", "the plain text"),
        (b"Subject: x\nContent-Type: text/plain; charset=no-such-thing\n\ncaf\xe9  \n\x07 bar", "x", "caf\u00e9 bar"),
        (b"\nno header at all", "", "no header at all"),
        (b"Subject: " + b"s" * 500 + b"\n\n" + b"b" * 5000, "s" * 120, "b" * 2000),
    ],
    ids=["mark-up", "two parts", "unknown character set", "no header", "long"],
)
def test_a_mail_is_its_subject_and_its_readable_text(raw: bytes, subject: str, body: str) -> None:
    assert fetch_mails.read_mail(raw) == (subject, body)


def test_mails_that_differ_in_numbers_and_case_are_the_same() -> None:
    assert fetch_mails.same_text_key("a", "Dear friend 123!") == fetch_mails.same_text_key("b", "dear FRIEND, 4")


def test_mails_without_a_body_are_told_apart_by_their_subject() -> None:
    assert fetch_mails.same_text_key("one", "") != fetch_mails.same_text_key("two", "")


def test_an_archive_becomes_one_line_per_distinct_mail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive = tmp_path / "mails.tgz"
    contents = {
        "easy-ham-1/1.txt": b"Subject: a\n\nlunch at 1?",
        "spam-1/1.txt": b"Subject: b\n\nbuy",
        "spam-2/2.txt": b"Subject: c\n\nbuy 2",
    }
    with tarfile.open(archive, "w:gz") as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"package/data/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    lines = [json.loads(line) for line in fetch_mails.build(archive).splitlines()]
    assert sorted(line[1:] for line in lines) == [[False, "a", "lunch at 1?"], [True, "b", "buy"]]
    assert "3 mails, 2 distinct" in capsys.readouterr().out
