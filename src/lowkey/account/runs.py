"""The runs that a ledger's records tell of, and the report a reader gets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lowkey.account.epsilon import Bound, compose
from lowkey.account.events import Event
from lowkey.account.header import RunHeader, header_from_json
from lowkey.account.records import SHORTEST_INTENT, Scan, scan
from lowkey.account.statement import format_up
from lowkey.errors import LedgerError


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run as the records tell it.

    Fields:
        header: Its public facts.
        num_intents: Releases charged to it; never below the number made.
        num_committed: The last step that is known to have reached the weights.
        reserve: How many releases its process sets aside at a time.
        num_torn: How many of the charged releases stand for a broken end of the file.
        returns: For each return to a checkpoint that did not know the last releases, how many were charged by then.
    """

    header: RunHeader
    num_intents: int = 0
    num_committed: int = 0
    reserve: int = 1
    num_torn: int = 0
    returns: tuple[int, ...] = ()

    @property
    def events(self) -> list[Event]:
        """The charged releases, in the terms that compose."""
        return self.header.events(self.num_intents, self.returns)


def fold(found: Scan, path: str) -> tuple[Run, ...]:
    """Replay the records into runs, the broken end included.

    Raises:
        LedgerError: If the records contradict each other.

    Guarantee:
        No run is charged less than the releases it made: an intent is written before its release, and a broken end is charged with
        the most that one record can stand for.
    """
    runs: list[Run] = []
    for number, record in enumerate(found.records[1:], start=2):
        try:
            _apply(runs, record.body)
        except (KeyError, TypeError, IndexError, ValueError, LedgerError) as error:
            raise LedgerError(
                f"record {number} of {path} cannot follow the ones before it ({error}). "
                "A ledger is only ever written by lowkey. Restore the file from a copy."
            ) from error
    if found.torn and runs:
        last = last_writer(found)
        runs[last] = charge_torn(runs[last], len(found.torn))
    return tuple(runs)


def charge_torn(run: Run, num_bytes: int) -> Run:
    """Charge a run for a broken end of ``num_bytes``: as many releases as its records could have charged in that space."""
    count = torn_count(run, num_bytes)
    return replace(run, num_intents=run.num_intents + count, num_torn=run.num_torn + count)


def torn_count(run: Run, num_bytes: int) -> int:
    """Return how many releases a broken end of ``num_bytes`` may hide.

    Guarantee:
        Never too few: the end holds at most this many whole intents, each of at most ``run.reserve`` releases. An intent that is itself
        cut was not yet durable, or was made so by someone who cut the file; it counts as well.
    """
    return run.reserve * max(1, num_bytes // SHORTEST_INTENT)


def last_writer(found: Scan) -> int:
    """Return the index of the run that wrote the last whole record; the file must have a run."""
    return _count(found.records[-1].body["run"])


def _apply(runs: list[Run], body: Mapping[str, Any]) -> None:
    kind, index = body["kind"], _count(body["run"])
    if kind == "run":
        _require(index == len(runs), "its run number is not the next one")
        runs.append(Run(header=header_from_json(body), reserve=_count(body["reserve"])))
        return
    _require(index < len(runs), "it names a run that has no header")
    runs[index] = _advance(runs[index], kind, body)


def _advance(run: Run, kind: str, body: Mapping[str, Any]) -> Run:
    match kind:
        case "intent":
            count = _count(body["count"])
            _require(1 <= count <= run.reserve, "it charges more releases than were set aside")
            _require(body["step"] == run.num_intents + 1, "a step is missing or repeated")
            return replace(run, num_intents=run.num_intents + count, num_committed=_count(body["committed"]))
        case "close":
            count = _count(body["unused"])
            _require(count < run.reserve and count <= run.num_intents, "it returns more releases than were set aside")
            return replace(run, num_intents=run.num_intents - count, num_committed=_count(body["committed"]))
        case "torn":
            num_bytes = _count(body["num_bytes"])
            _require(body["count"] == torn_count(run, num_bytes), "it charges another number of releases than its bytes could hide")
            return charge_torn(run, num_bytes)
        case "resume":
            plan = replace(run.header.plan, num_steps=body["num_steps"])
            returns = (*run.returns, run.num_intents) if body.get("goes_back") else run.returns
            return replace(run, header=replace(run.header, plan=plan), reserve=_count(body["reserve"]), returns=returns)
        case _:
            raise ValueError(f"its kind {kind!r} is unknown")


def _count(value: object) -> int:
    _require(isinstance(value, int) and not isinstance(value, bool) and value >= 0, f"{value!r} is no count")
    assert isinstance(value, int)
    return value


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


@dataclass(frozen=True, kw_only=True)
class LedgerReport:
    """What a ledger's file says, for people; ``str()`` lays it out.

    Fields:
        path: The file.
        runs: Every run in it, oldest first.
        num_torn_bytes: Length of a broken end, already charged; also seen while a process is in the middle of writing.
    """

    path: str
    runs: tuple[Run, ...]
    num_torn_bytes: int

    @property
    def datasets(self) -> tuple[str, ...]:
        """The data sets that the runs name, in order of their first run."""
        return tuple(dict.fromkeys(run.header.dataset for run in self.runs))

    def bound(self, dataset: str, delta: float) -> Bound:
        """Return the bound on all runs over ``dataset`` together."""
        return compose(events_of(self.runs, dataset), delta)

    def __str__(self) -> str:
        lines = [f"{self.path}: {len(self.runs)} run{'' if len(self.runs) == 1 else 's'}"]
        lines += [_describe(run) for run in self.runs]
        for dataset in self.datasets:
            delta = min(run.header.plan.delta for run in self.runs if run.header.dataset == dataset)
            bound = self.bound(dataset, delta)
            lines.append(f"  all runs on {dataset!r}: (ε = {format_up(bound.epsilon)}, δ = {delta:g}), {bound.accountant.value}")
        if self.num_torn_bytes:
            lines.append(f"  the last {self.num_torn_bytes} bytes are an unfinished record, charged as releases")
        return "\n".join(lines)


def read_ledger(path: str | os.PathLike[str]) -> LedgerReport:
    """Read a ledger without locking or changing it.

    Raises:
        LedgerError: If there is no such file, or it is damaged.

    Guarantee:
        Reports at least the releases that had been made when the read began. Releases that a living process has set aside count as made.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise LedgerError(f"{os.fspath(path)} cannot be read: {error.strerror}. It must be the file given as ledger=.") from error
    found = scan(data, os.fspath(path))
    return LedgerReport(path=os.fspath(path), runs=fold(found, os.fspath(path)), num_torn_bytes=len(found.torn))


def events_of(runs: Iterable[Run], dataset: str) -> list[Event]:
    """Return the charged releases of all runs over ``dataset``."""
    return [event for run in runs if run.header.dataset == dataset for event in run.events]


def _describe(run: Run) -> str:
    header, plan = run.header, run.header.plan
    torn = f", {run.num_torn} of them for a broken record" if run.num_torn else ""
    epsilon = format_up(compose(run.events, plan.delta).epsilon)
    return (
        f"  {header.run_id}  {header.method} on {header.dataset!r}: "
        f"{run.num_intents} of {plan.num_steps} releases charged{torn}, {run.num_committed} committed; "
        f"{plan.sampling}, q = {plan.sampling_rate:.6g}, σ = {plan.noise_multiplier:.6g}; (ε = {epsilon}, δ = {plan.delta:g})"
    )
