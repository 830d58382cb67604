r"""The bytes of a ledger: one line per record, each checked alone and chained to all before it.

    length(8 hex) crc32(8 hex) chain(32 hex) {json}\n

``length`` and ``crc32`` are those of ``chain + json``; ``chain`` is the first half of ``sha256(chain of the record before + json)``.
A file is a sequence of such lines. Only its end may be broken: a process that died while appending leaves part of one line.
Anything else is an edit or a broken disk, and is refused.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowkey.errors import LedgerError

MAX_RECORD = 1 << 16
"""Longest record in bytes; a broken end that is longer is not the trace of one append."""

_CHAIN = 32
_PREFIX = 8 + 1 + 8 + 1 + _CHAIN + 1
ROOT = "0" * _CHAIN


@dataclass(frozen=True)
class Record:
    """One record: its body, and the hash over everything up to and including it."""

    body: Mapping[str, Any]
    chain: str


@dataclass(frozen=True)
class Scan:
    """What a ledger's bytes hold.

    Fields:
        records: The whole records, in order.
        size: The bytes that they take.
        torn: The bytes after them, the trace of an append that did not finish.
    """

    records: tuple[Record, ...]
    size: int
    torn: bytes

    @property
    def chain(self) -> str:
        """The hash over all whole records."""
        return self.records[-1].chain if self.records else ROOT


def _chain(previous: str, text: bytes) -> str:
    return hashlib.sha256(previous.encode("ascii") + text).hexdigest()[:_CHAIN]


def encode(body: Mapping[str, Any], previous: str, *, at_least: int = 0) -> tuple[bytes, str]:
    """Write one record.

    Args:
        body: What it says.
        previous: The chain of the record before it.
        at_least: Pad with spaces to this many bytes, so that it covers a broken end completely.

    Returns:
        The line, and its chain.
    """
    text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode("ascii")
    text += b" " * (at_least - _PREFIX - len(text) - 1)
    chain = _chain(previous, text)
    payload = chain.encode("ascii") + b" " + text
    line = b"%08x %08x %b\n" % (len(payload), zlib.crc32(payload), payload)
    if len(line) > MAX_RECORD:
        raise LedgerError(f"a ledger record of {len(line)} bytes is too long. It must fit {MAX_RECORD}. Shorten the names in the header.")
    return line, chain


def intent_body(*, run: int, step: int, count: int, committed: int) -> dict[str, Any]:
    """Say that run ``run`` is charged for ``count`` releases from ``step`` on."""
    return {"kind": "intent", "run": run, "step": step, "count": count, "committed": committed}


FIRST_BODY: Mapping[str, Any] = {"kind": "ledger", "format": "lowkey", "version": 1}
FIRST_LINE, FIRST_CHAIN = encode(FIRST_BODY, ROOT)
SHORTEST_INTENT = len(encode(intent_body(run=0, step=1, count=1, committed=0), ROOT)[0])
"""No record that charges a release is shorter than this many bytes."""


def scan(data: bytes, path: str) -> Scan:
    """Read every record of a ledger's bytes.

    Raises:
        LedgerError: If the bytes are not a ledger, or are broken anywhere but in their last line.

    Guarantee:
        A record that was written whole and is unchanged is never dropped silently: either it is returned, or the ledger is refused,
        or it is the last line and its bytes are returned as ``torn``.
    """
    if not data.startswith(FIRST_LINE):
        # The first line is durable before the second is begun, so its traces are never longer than itself.
        if len(data) <= len(FIRST_LINE) and FIRST_LINE.startswith(data.rstrip(b"\0")):
            return Scan((), 0, data)
        raise LedgerError(f"{path} is not a lowkey ledger. It must begin with a ledger record. Choose another path for ledger=.")
    records = [Record(FIRST_BODY, FIRST_CHAIN)]
    position = len(FIRST_LINE)
    while position < len(data):
        end = data.find(b"\n", position)
        record = None if end < 0 else _decode(data[position:end], records[-1].chain)
        if record is None:
            return _torn(records, data, position, path)
        records.append(record)
        position = end + 1
    return Scan(tuple(records), position, b"")


def _torn(records: list[Record], data: bytes, position: int, path: str) -> Scan:
    rest = data[position:]
    # PRIVACY: only one unfinished append may be forgiven; a broken record with others after it hides releases.
    if b"\n" in rest[:-1] or len(rest) > MAX_RECORD:
        raise LedgerError(
            f"{path} is damaged at byte {position}, in record {len(records) + 1}, and more records follow. "
            "Every record must be whole for the count of releases to hold. "
            "Restore the file from a copy, or treat every run on this data set as having made all its planned releases."
        )
    return Scan(tuple(records), position, rest)


def _decode(line: bytes, previous: str) -> Record | None:
    """Read one line without its newline; None if a bit of it is wrong."""
    if len(line) < _PREFIX or line[8:9] != b" " or line[17:18] != b" " or line[_PREFIX - 1 : _PREFIX] != b" ":
        return None
    payload, text = line[18:], line[_PREFIX:]
    if line[:17] != b"%08x %08x" % (len(payload), zlib.crc32(payload)):
        return None
    chain = _chain(previous, text)
    if line[18 : _PREFIX - 1] != chain.encode("ascii"):
        return None
    try:
        body = json.loads(text)
    except ValueError:
        return None
    return Record(body, chain) if isinstance(body, dict) else None
