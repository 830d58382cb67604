"""The count of releases: charged before each one is made, and never forgotten."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Protocol, final

from lowkey.account.epsilon import Bound, compose
from lowkey.account.events import Event
from lowkey.account.header import Head, RunHeader
from lowkey.account.statement import format_up
from lowkey.checks import require_count
from lowkey.errors import BudgetError, LedgerError

History = tuple[tuple[float, float, int], ...]
"""Entries ``(sampling_rate, noise_multiplier, num_steps)``, one per run."""


class Ledger(Protocol):
    """Counts the releases of a run, together with those of earlier runs on the same data set.

    Life cycle: `open_ledger`; then for every step `intend` before anything private is drawn, and `commit` when the weights have moved;
    at last `close`. A checkpoint stores `head`.

    Guarantee:
        When `intend` returns, the release is charged. Nothing uncharges it.
    """

    @property
    def header(self) -> RunHeader:
        """The facts of this run."""
        ...

    @property
    def num_intents(self) -> int:
        """How many releases are charged to this run."""
        ...

    @property
    def head(self) -> Head:
        """What a checkpoint must store to resume."""
        ...

    def intend(self) -> int:
        """Charge one release and return its number within this run, from 1.

        Raises:
            BudgetError: If the plan allows no further release.
            LedgerError: If the charge could not be recorded; then no release may be made.
        """
        ...

    def commit(self, step: int) -> None:
        """Note that the weights have taken step ``step``; recorded with the next charge, and never needed for the bound."""
        ...

    def history(self) -> History:
        """Return the releases of every run on this data set, as rates, noise multipliers and counts."""
        ...

    def events(self) -> list[Event]:
        """Return the same releases with their samplers, in the terms that compose."""
        ...

    def bound(self, delta: float | None = None) -> Bound:
        """Return the bound on all runs on this data set together, at the plan's delta unless another is given."""
        ...

    def epsilon(self, delta: float | None = None) -> float:
        """Return the epsilon of `bound`."""
        ...

    def close(self) -> None:
        """Return what was set aside and not used, and let go of the file. A closed ledger charges nothing any more."""
        ...


def open_ledger(path: str | os.PathLike[str] | None, header: RunHeader, *, reserve: int = 1, resume: Head | None = None) -> Ledger:
    """Open the ledger of a run.

    Args:
        path: The ledger's file, made with its folders if it is missing; None counts in memory.
        header: The facts of the run.
        reserve: How many releases to charge at a time. More saves disk writes; a crash forfeits what was set aside.
        resume: The head that a checkpoint stored. Without one, a new run begins, after those that the file already holds.

    Raises:
        LedgerError: If the file is damaged, in use, not a ledger, or not the one that the checkpoint knows.
        ConfigError: If ``reserve`` is not a positive count.

    Guarantee:
        With a path, the charged releases are at least those made, whenever and however a process dies, as long as the disk keeps
        what ``fdatasync`` promised. In memory, what a process did after its last checkpoint is forgotten when it dies.

    Example:
        >>> from lowkey.account.plan import Plan
        >>> plan = Plan(noise_multiplier=1.0, delta=1e-5, num_examples=100, expected_batch_size=10, num_steps=2)
        >>> ledger = open_ledger(None, RunHeader(plan=plan))
        >>> ledger.intend(), ledger.intend(), ledger.history()
        (1, 2, ((0.1, 1.0, 2),))
    """
    require_count("reserve", reserve)
    if path is None:
        return MemoryLedger(header, resume)
    from lowkey.account.file_ledger import FileLedger  # needs file locks, which not every system has

    return FileLedger(path, header, reserve=reserve, resume=resume)


@final
class MemoryLedger:
    """A `Ledger` that lives as long as its process."""

    def __init__(self, header: RunHeader, resume: Head | None = None) -> None:
        if resume is not None and resume.chain:
            raise LedgerError(
                f"the checkpoint of run {resume.run_id} has a ledger on disk, and none was given. "
                "Without it the releases after the checkpoint would not be counted. Pass the same path as ledger=."
            )
        self._header = header if resume is None else replace(header, run_id=resume.run_id)
        self._num_intents = 0 if resume is None else resume.num_intents
        self._is_open = True

    @property
    def header(self) -> RunHeader:
        return self._header

    @property
    def num_intents(self) -> int:
        return self._num_intents

    @property
    def head(self) -> Head:
        return Head(run_id=self._header.run_id, num_records=0, chain="", num_intents=self._num_intents)

    def intend(self) -> int:
        if not self._is_open:
            raise LedgerError(
                "the ledger is closed. A release must be charged before it is made. Open a ledger that resumes from its head."
            )
        check_budget(self._header, self._num_intents)
        self._num_intents += 1
        return self._num_intents

    def commit(self, step: int) -> None:
        require_step(step, self._num_intents)

    def history(self) -> History:
        return (history_entry(self._header, self._num_intents),)

    def events(self) -> list[Event]:
        return self._header.events(self._num_intents)

    def bound(self, delta: float | None = None) -> Bound:
        return compose(self.events(), self._header.plan.delta if delta is None else delta)

    def epsilon(self, delta: float | None = None) -> float:
        return self.bound(delta).epsilon

    def close(self) -> None:
        self._is_open = False


def history_entry(header: RunHeader, num_intents: int) -> tuple[float, float, int]:
    """Return a run's line of a history."""
    return header.plan.sampling_rate, float(header.plan.noise_multiplier), num_intents


def check_budget(header: RunHeader, num_intents: int) -> None:
    """Check that one more release is planned.

    Raises:
        BudgetError: If not, with the epsilon that the plan has spent by then.
    """
    if num_intents < header.num_steps:
        return
    plan = header.plan
    raise BudgetError(
        f"step {num_intents + 1} would exceed the planned {header.num_steps} releases "
        f"(epsilon {format_up(plan.epsilon)} at delta {plan.delta:g}). Stop, or re-plan with num_steps={math.ceil(1.2 * header.num_steps)}."
    )


def require_step(step: int, num_intents: int) -> int:
    """Check that ``step`` was charged before it is committed.

    Raises:
        LedgerError: If it was not.
    """
    if require_count("step", step) > num_intents:
        raise LedgerError(f"step {step} is committed, but only {num_intents} were charged. A step must be intended first. Call intend().")
    return step
