"""Cut, flip, or edit any byte of a ledger: it is refused, or it charges for everything that it may have lost."""

from __future__ import annotations

import itertools
import shutil
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledgers import HEADER, open_at, spend

from lowkey.account import Head, read_ledger
from lowkey.account.header import header_to_json
from lowkey.account.records import FIRST_CHAIN, FIRST_LINE, ROOT, _chain, encode, scan
from lowkey.account.runs import fold
from lowkey.errors import LedgerError

RESERVE = 3


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Head]:
    """A ledger with two runs, a resumption, reservations and a clean end; and the head of its last run."""
    path = tmp_path_factory.mktemp("whole") / "ledger"
    first = open_at(path)
    spend(first, 4)
    first.close()
    second = open_at(path, run_id="run-2", reserve=RESERVE)
    spend(second, 5)
    head = second.head
    second.close()
    resumed = open_at(path, run_id="run-2", resume=head, reserve=2)
    spend(resumed, 3)
    head = resumed.head
    resumed.close()
    return path.read_bytes(), head


def counts(data: bytes) -> list[int]:
    return [run.num_intents for run in fold(scan(data, "ledger"), "ledger")]


def record_ends(data: bytes) -> list[int]:
    return [position + 1 for position, byte in enumerate(data) if byte == 0x0A]


def granted_by(data: bytes, length: int) -> list[int]:
    """Count, from the whole records alone, what the first ``length`` bytes grant each run (no torn end charged)."""
    end = max((end for end in record_ends(data) if end <= length), default=0)
    return counts(data[:end]) if end else []


def test_every_cut_charges_at_least_what_was_granted_before_it(whole: tuple[bytes, Head]) -> None:
    data, _ = whole
    failures = []
    for length in range(len(data) + 1):
        found = counts(data[:length])
        known = granted_by(data, length)
        is_torn = length not in record_ends(data) and length > len(FIRST_LINE)
        enough = len(found) == len(known) and all(a >= b for a, b in zip(found, known, strict=True))
        charged_for_cut = not is_torn or not known or sum(found) > sum(known)
        if not (enough and charged_for_cut):
            failures.append(length)
    assert failures == []


def test_a_cut_inside_an_intent_charges_what_the_intent_charged(whole: tuple[bytes, Head]) -> None:
    data, _ = whole
    ends = record_ends(data)
    after = [counts(data[:end]) for end in ends[1:]]
    for (start, end), charged in zip(itertools.pairwise(ends), after, strict=True):
        if b'"kind":"intent"' in data[start:end]:
            assert sum(counts(data[: end - 1])) >= sum(charged)
            assert sum(counts(data[: start + 1])) >= sum(charged)


@pytest.mark.parametrize("stride", range(7))
def test_every_cut_can_be_reopened_and_never_charges_less_afterwards(tmp_path: Path, whole: tuple[bytes, Head], stride: int) -> None:
    data, _ = whole
    path = tmp_path / "ledger"
    for length in range(stride * 11, len(data), 77):
        path.write_bytes(data[:length])
        before = counts(data[:length])
        ledger = open_at(path, run_id="run-3")
        ledger.intend()
        assert [run.num_intents for run in read_ledger(path).runs] == [*before, 1]
        ledger.close()
        assert [run.num_intents for run in read_ledger(path).runs] == [*before, 1]
        assert read_ledger(path).num_torn_bytes == 0


def test_dying_while_a_broken_end_is_mended_leaves_it_charged(tmp_path: Path, whole: tuple[bytes, Head]) -> None:
    data, _ = whole
    path = tmp_path / "ledger"
    torn = data[: record_ends(data)[-2] + 40]
    path.write_bytes(torn)
    expected = counts(torn)
    open_at(path, run_id="run-3").close()
    mended = path.read_bytes()
    start = record_ends(data)[-2]
    end = mended.index(b"\n", start) + 1
    for written in range(end - start + 1):  # the mending record is written over the broken end, byte by byte
        halfway = mended[: start + written] + torn[start + written :]
        assert counts(halfway) == expected


def test_every_flipped_bit_is_refused_or_charged(whole: tuple[bytes, Head]) -> None:
    data, _ = whole
    honest = counts(data)
    first_forgivable = record_ends(data)[-2] - 1  # the newline before the last record; without it, the last two are one broken end
    silent = []
    for position in range(len(data)):
        for bit in (0, 3, 6):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            try:
                found = counts(bytes(flipped))
            except LedgerError:
                continue
            if position < first_forgivable or any(a < b for a, b in zip(found, honest, strict=True)):
                silent.append((position, bit))
    assert silent == []


@pytest.mark.parametrize("num_joined", [2, 3, 5])
def test_intents_joined_by_lost_newlines_are_all_charged(tmp_path: Path, num_joined: int) -> None:
    path = tmp_path / "ledger"
    ledger = open_at(path)
    spend(ledger, 6)
    data = bytearray(path.read_bytes())
    ledger.close()
    for end in record_ends(bytes(data))[-num_joined:-1]:
        data[end - 1] ^= 1
    assert counts(bytes(data))[0] >= 6


@given(st.data())
def test_random_bytes_after_the_last_record_are_refused_or_charged(whole: tuple[bytes, Head], data: st.DataObject) -> None:
    ledger, _ = whole
    garbage = data.draw(st.binary(min_size=1, max_size=200))
    try:
        found = counts(ledger + garbage)
    except LedgerError:
        assert b"\n" in garbage[:-1]
    else:
        assert sum(found) > sum(counts(ledger))


def test_zeros_that_a_crash_left_at_the_end_are_charged(whole: tuple[bytes, Head]) -> None:
    data, _ = whole
    assert sum(counts(data + b"\0" * 512)) > sum(counts(data))


def test_a_dropped_record_in_the_middle_is_refused(whole: tuple[bytes, Head]) -> None:
    data, _ = whole
    ends = record_ends(data)
    with pytest.raises(LedgerError, match="damaged"):
        counts(data[: ends[2]] + data[ends[3] :])


def test_two_swapped_records_are_refused(whole: tuple[bytes, Head]) -> None:
    data, _ = whole
    a, b, c = record_ends(data)[2:5]
    with pytest.raises(LedgerError, match="damaged"):
        counts(data[:a] + data[b:c] + data[a:b] + data[c:])


@pytest.mark.parametrize("num_records", [0, 1, 2, 5, 9])
def test_a_checkpoint_refuses_a_ledger_that_was_cut_back(tmp_path: Path, whole: tuple[bytes, Head], num_records: int) -> None:
    data, head = whole
    path = tmp_path / "ledger"
    path.write_bytes(data[: [0, *record_ends(data)][num_records]])
    with pytest.raises(LedgerError, match="shorter ledger"):
        open_at(path, run_id="run-2", resume=head)


def test_a_checkpoint_refuses_a_ledger_that_was_rewritten(tmp_path: Path, whole: tuple[bytes, Head]) -> None:
    data, head = whole
    lines, chain = [FIRST_LINE], scan(FIRST_LINE, "").chain
    for record in scan(data, "").records[1:]:
        line, chain = encode({**record.body, "committed": 0}, chain)  # an editor who mends every sum
        lines.append(line)
    path = tmp_path / "ledger"
    path.write_bytes(b"".join(lines))
    with pytest.raises(LedgerError, match="not the ledger that the checkpoint"):
        open_at(path, run_id="run-2", resume=head)


@pytest.mark.parametrize(
    "body",
    [
        {"kind": "intent", "run": 0, "step": 9, "count": 1, "committed": 0},
        {"kind": "intent", "run": 0, "step": 1, "count": 2, "committed": 0},
        {"kind": "intent", "run": 0, "step": 1, "count": -1, "committed": 0},
        {"kind": "intent", "run": 1, "step": 1, "count": 1, "committed": 0},
        {"kind": "close", "run": 0, "unused": 1, "committed": 0},
        {"kind": "run", "run": 0, "reserve": 1},
        {"kind": "run", "run": 1, "reserve": 1},
        {**header_to_json(HEADER), "kind": "run", "run": 1, "reserve": 1, "sampling": {"kind": "with_replacement"}},
        {**header_to_json(HEADER), "kind": "run", "run": 1, "reserve": 1, "delta": 2.0},
        {"kind": "forgive", "run": 0},
        {"kind": "intent"},
    ],
)
def test_records_that_contradict_each_other_are_refused(tmp_path: Path, body: dict[str, object]) -> None:
    path = tmp_path / "ledger"
    ledger = open_at(path)
    chain = ledger.head.chain
    del ledger
    path.write_bytes(path.read_bytes() + encode(body, chain)[0])
    with pytest.raises(LedgerError, match="record 3"):
        read_ledger(path)


@pytest.mark.parametrize("text", [b"{", b"[1]", b"\xff"], ids=["broken", "a list", "no text"])
def test_a_record_whose_sums_are_right_but_whose_text_is_none_is_not_read(text: bytes) -> None:
    payload = _chain(FIRST_CHAIN, text).encode() + b" " + text
    line = b"%08x %08x %s" % (len(payload), zlib.crc32(payload), payload)
    found = scan(FIRST_LINE + line + b"\n", "ledger")
    assert (len(found.records), found.torn) == (1, line + b"\n")


def test_a_file_that_is_no_ledger_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("ten years of work")
    with pytest.raises(LedgerError, match="not a lowkey ledger"):
        open_at(path)
    assert path.read_text() == "ten years of work"


def test_an_unfinished_first_line_is_begun_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(FIRST_LINE[:20] + b"\0" * 9)
    ledger = open_at(path)
    spend(ledger, 2)
    ledger.close()
    assert read_ledger(path).runs[0].num_intents == 2
    assert scan(path.read_bytes(), "").records[0].chain != ROOT


def test_a_copy_of_a_ledger_counts_the_same(tmp_path: Path, whole: tuple[bytes, Head]) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(whole[0])
    shutil.copy(path, tmp_path / "copy")
    assert [run.num_intents for run in read_ledger(tmp_path / "copy").runs] == [4, 8]
