"""The ledger on disk: record the charge, make it durable, and only then let the release happen."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from lowkey.account.epsilon import Bound, compose
from lowkey.account.events import Event
from lowkey.account.header import Head, RunHeader, check_same_run, header_to_json
from lowkey.account.ledger import History, check_budget, history_entry, require_step
from lowkey.account.log_file import LogFile
from lowkey.account.records import FIRST_BODY, Scan, encode, intent_body, scan
from lowkey.account.runs import Run, fold, last_writer, torn_count
from lowkey.errors import LedgerError


@dataclass(frozen=True)
class _State:
    """What the file holds by this process's knowledge; replaced as a whole, so that an interrupt finds either the old or the new one."""

    chain: str
    num_records: int
    end: int
    num_charged: int


@final
class FileLedger:
    """A `lowkey.account.ledger.Ledger` in an append-only file that may hold several runs.

    Guarantee:
        The file charges this run for at least the releases that `intend` has granted, at every moment and after any crash.
        With ``reserve`` above 1 it charges for those set aside as well, until `close` returns them.
    """

    def __init__(self, path: str | os.PathLike[str], header: RunHeader, *, reserve: int, resume: Head | None) -> None:
        self._mutex = threading.Lock()
        self._reserve = reserve
        self._log = LogFile(path)
        try:
            self._start(header, resume)
        except BaseException:
            self._log.close()
            raise

    @property
    def header(self) -> RunHeader:
        return self._header

    @property
    def num_intents(self) -> int:
        return self._num_intents

    @property
    def head(self) -> Head:
        state = self._state
        return Head(run_id=self._header.run_id, num_records=state.num_records, chain=state.chain, num_intents=self._num_intents)

    def intend(self) -> int:
        with self._mutex:
            self._log.check_usable()
            check_budget(self._header, self._num_intents)
            if self._num_intents == self._state.num_charged:
                self._charge(min(self._reserve, self._header.num_steps - self._num_intents))
            self._num_intents += 1
            return self._num_intents

    def commit(self, step: int) -> None:
        self._num_committed = max(self._num_committed, require_step(step, self._num_intents))

    def history(self) -> History:
        earlier = [history_entry(run.header, run.num_intents) for run in self._earlier]
        return (*earlier, history_entry(self._header, self._num_intents))

    def events(self) -> list[Event]:
        earlier = [event for run in self._earlier for event in run.events]
        return [*earlier, *self._header.events(self._num_intents, self._returns)]

    def bound(self, delta: float | None = None) -> Bound:
        return compose(self.events(), self._header.plan.delta if delta is None else delta)

    def epsilon(self, delta: float | None = None) -> float:
        return self.bound(delta).epsilon

    def close(self) -> None:
        with self._mutex:
            try:
                if self._log.is_usable:
                    unused = self._state.num_charged - self._num_intents
                    body = {"kind": "close", "run": self._index, "unused": unused, "committed": self._num_committed}
                    self._append(body, num_charged=self._num_intents)
            finally:
                self._log.close()

    def _start(self, header: RunHeader, resume: Head | None) -> None:
        path = str(self._log.path)
        found = scan(self._log.read(), path)
        runs = fold(found, path)
        self._index = len(runs) if resume is None else find_run(found, runs, resume, path)
        before = None if resume is None else runs[self._index]
        if before is not None:
            check_same_run(before.header, header)
        self._header = header if before is None else replace(header, run_id=before.header.run_id)
        self._num_intents = 0 if before is None else before.num_intents
        self._num_committed = 0 if before is None else before.num_committed
        goes_back = before is not None and resume is not None and before.num_intents != resume.num_intents
        returns = () if before is None else before.returns
        self._returns = (*returns, self._num_intents) if goes_back else returns
        self._earlier = tuple(run for index, run in enumerate(runs) if index != self._index and run.header.dataset == header.dataset)
        self._state = _State(found.chain, len(found.records), found.size, self._num_intents)
        self._mend(found, runs)
        self._announce(is_new=before is None, covering=len(found.torn) if not runs else 0, goes_back=goes_back)

    def _announce(self, *, is_new: bool, covering: int, goes_back: bool) -> None:
        """Record who writes from here on, over a broken end of ``covering`` bytes that no run can be charged for."""
        facts = header_to_json(self._header)
        kind = {"kind": "run" if is_new else "resume", "run": self._index, "reserve": self._reserve}
        if is_new:
            self._append({**kind, **facts}, at_least=covering)
        else:
            self._append({**kind, "num_steps": facts["num_steps"], "goes_back": goes_back, "versions": facts["versions"]})

    def _mend(self, found: Scan, runs: tuple[Run, ...]) -> None:
        """Begin an empty file, and replace a broken end by a record that charges for it."""
        if not found.records:
            self._append(FIRST_BODY, at_least=0)
        elif found.torn and runs:
            index = last_writer(found)
            body = {"kind": "torn", "run": index, "count": torn_count(runs[index], len(found.torn)), "num_bytes": len(found.torn)}
            # PRIVACY: written over the broken end and never shorter, so that dying halfway leaves a broken end that is charged again.
            self._append(body, at_least=len(found.torn))

    def _charge(self, count: int) -> None:
        body = intent_body(run=self._index, step=self._num_intents + 1, count=count, committed=self._num_committed)
        # PRIVACY: the charge is durable before its number is handed out, so before anything private is drawn for the step.
        self._append(body, num_charged=self._num_intents + count)

    def _append(self, body: Mapping[str, Any], *, at_least: int = 0, num_charged: int | None = None) -> None:
        state = self._state
        line, chain = encode(body, state.chain, at_least=at_least)
        charged = state.num_charged if num_charged is None else num_charged
        try:
            self._log.write_end(state.end, line)
            self._state = _State(chain, state.num_records + 1, state.end + len(line), charged)
        finally:
            if self._log.size != self._state.end:
                # PRIVACY: an interrupt fell between the write and the line after it; another record would break the chain.
                self._log.refuse_from_now("it was interrupted while writing a record")


def find_run(found: Scan, runs: tuple[Run, ...], resume: Head, path: str) -> int:
    """Return the index of the run that a checkpoint belongs to.

    Raises:
        LedgerError: If the file is not the one that the checkpoint knows, or an earlier state of it.

    Guarantee:
        Every record that the ledger had when the checkpoint was written is still there, unchanged.
    """
    if not resume.chain:
        raise LedgerError(
            f"the checkpoint of run {resume.run_id} was written without a ledger on disk, so {path} cannot hold its releases. "
            "Resume with ledger=None, or start a new run."
        )
    if len(found.records) < resume.num_records or resume.num_records < 1:
        raise LedgerError(
            f"{path} has {len(found.records)} records, and the checkpoint of run {resume.run_id} has seen {resume.num_records}. "
            "A shorter ledger forgets releases. Restore the ledger that was beside the checkpoint."
        )
    if found.records[resume.num_records - 1].chain != resume.chain:
        raise LedgerError(
            f"{path} is not the ledger that the checkpoint of run {resume.run_id} knows: record {resume.num_records} differs. "
            "Another history forgets releases. Restore the ledger that was beside the checkpoint."
        )
    for index, run in enumerate(runs):
        if run.header.run_id == resume.run_id:
            return index
    raise LedgerError(f"{path} has no run {resume.run_id}. The checkpoint must belong to a run of this ledger. Check both paths.")
