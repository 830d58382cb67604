"""The mails that the package carries: 5,605 distinct ones, spam or not (README.md beside this file says where from)."""

from __future__ import annotations

import hashlib
import json
import lzma
from dataclasses import dataclass
from importlib import resources

from lowkey.errors import ConfigError

FILE_NAME = "mails.jsonl.xz"
LINES_SHA256 = "f7d3ceb864fb025b2e6e44e87ce3203a5dcfcf616e7178c3e9ce7c92428dbda4"


@dataclass(frozen=True, kw_only=True)
class Mail:
    """One mail.

    Fields:
        subject: Its subject line, up to 120 characters; may be empty.
        body: The beginning of its readable text, up to 2,000 characters; may be empty.
        is_spam: Whether its recipient called it spam.
    """

    subject: str
    body: str
    is_spam: bool

    @property
    def text(self) -> str:
        """The subject, a line break, the body."""
        return f"{self.subject}\n{self.body}"


@dataclass(frozen=True, kw_only=True)
class Mails:
    """The two splits; no body is in both.

    Fields:
        train: Mails to train on.
        test: Mails to measure on.
    """

    train: tuple[Mail, ...]
    test: tuple[Mail, ...]

    def first(self, number: int | None) -> Mails:
        """Return the first `number` mails of each split, which are a fair sample of it; all of them if None."""
        return Mails(train=self.train[:number], test=self.test[:number])


def load_mails() -> Mails:
    """Return the mails of the package, always the same ones in the same order.

    Raises:
        ConfigError: The file was changed or damaged.

    Example:
        >>> mails = load_mails()
        >>> len(mails.train), len(mails.test)
        (4502, 1103)
        >>> sum(mail.is_spam for mail in mails.test)
        332
    """
    lines = _read_lines()
    by_split: dict[str, list[Mail]] = {"train": [], "test": []}
    for line in lines.splitlines():
        split, is_spam, subject, body = json.loads(line)
        by_split[split].append(Mail(subject=subject, body=body, is_spam=is_spam))
    return Mails(train=tuple(by_split["train"]), test=tuple(by_split["test"]))


def _read_lines() -> bytes:
    packed = resources.files("lowkey.data").joinpath(FILE_NAME).read_bytes()
    try:
        lines = lzma.decompress(packed)
    except lzma.LZMAError:
        lines = b""
    if hashlib.sha256(lines).hexdigest() != LINES_SHA256:
        raise ConfigError(
            f"{FILE_NAME} is not the file that this version was built with. "
            "The measured numbers hold for that one only. Reinstall lowkey, or rebuild it with scripts/fetch_mails.py."
        )
    return lines
