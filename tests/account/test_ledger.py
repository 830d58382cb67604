"""What a ledger counts, refuses and remembers."""

from __future__ import annotations

import errno
import math
import os
import threading
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path

import pytest
from ledgers import HEADER, PLAN, open_at, spend

from lowkey.account import Head, NoiseOrigin, RunHeader, TruncatedPoisson, Unsampled, epsilon, open_ledger, read_ledger
from lowkey.account.header import _versions
from lowkey.account.log_file import _let_go_in_child
from lowkey.account.records import scan
from lowkey.account.statement import format_up
from lowkey.errors import BudgetError, ConfigError, LedgerError


@pytest.fixture(params=["memory", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return None if request.param == "memory" else tmp_path / "deep" / "run" / "ledger"


# Counting ------------------------------------------------------------------


def test_intents_are_numbered_from_one(place: Path | None) -> None:
    ledger = open_ledger(place, HEADER)
    assert [ledger.intend() for _ in range(3)] == [1, 2, 3]
    assert ledger.num_intents == 3
    ledger.close()


def test_epsilon_is_that_of_the_intents_whether_committed_or_not(place: Path | None) -> None:
    ledger = open_ledger(place, HEADER)
    assert ledger.epsilon() == 0.0
    ledger.commit(ledger.intend())
    ledger.intend()
    assert ledger.history() == ((0.025, 2.0, 2),)
    assert ledger.epsilon() == PLAN.epsilon_after(2) == epsilon(ledger.history(), PLAN.delta)
    assert ledger.bound(1e-7).delta == 1e-7
    assert ledger.epsilon(1e-7) > ledger.epsilon()
    ledger.close()


@pytest.mark.parametrize("reserve", [1, 7, 1000])
def test_the_plan_ends_exactly_where_it_says(tmp_path: Path, reserve: int) -> None:
    ledger = open_at(tmp_path / "ledger", reserve=reserve)
    spend(ledger, 50)
    spent = format_up(PLAN.epsilon)
    with pytest.raises(
        BudgetError, match=rf"step 51 would exceed the planned 50 releases \(epsilon {spent} at delta 1e-05\).*num_steps=60"
    ):
        ledger.intend()
    assert ledger.num_intents == 50
    ledger.close()
    assert read_ledger(tmp_path / "ledger").runs[0].num_intents == 50


def test_the_memory_ledger_ends_there_too() -> None:
    ledger = open_ledger(None, HEADER)
    spend(ledger, 50)
    with pytest.raises(BudgetError, match="step 51"):
        ledger.intend()


def test_committing_what_was_not_charged_is_refused(place: Path | None) -> None:
    ledger = open_ledger(place, HEADER)
    ledger.intend()
    with pytest.raises(LedgerError, match="only 1 were charged"):
        ledger.commit(2)
    ledger.close()


def test_a_closed_ledger_charges_nothing(place: Path | None) -> None:
    ledger = open_ledger(place, HEADER, reserve=5)
    ledger.intend()
    ledger.close()
    ledger.close()
    with pytest.raises(LedgerError, match="closed"):
        ledger.intend()
    assert ledger.num_intents == 1


@pytest.mark.parametrize("reserve", [0, -1, 1.5])
def test_a_reserve_that_counts_nothing_is_refused(tmp_path: Path, reserve: int) -> None:
    with pytest.raises(ConfigError, match="reserve"):
        open_ledger(tmp_path / "ledger", HEADER, reserve=reserve)


def test_reservations_are_charged_on_disk_until_the_ledger_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = open_at(path, reserve=20)
    spend(ledger, 3)
    assert read_ledger(path).runs[0].num_intents == 20
    assert ledger.history()[0][2] == 3
    ledger.close()
    assert read_ledger(path).runs[0].num_intents == 3
    assert read_ledger(path).runs[0].num_committed == 3


def test_threads_never_get_the_same_number(tmp_path: Path) -> None:
    ledger = open_at(tmp_path / "ledger")
    numbers: list[int] = []
    threads = [threading.Thread(target=lambda: numbers.extend(ledger.intend() for _ in range(10))) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 51))
    ledger.close()


# Several runs ---------------------------------------------------------------


def test_runs_on_one_data_set_compose(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    first = open_at(path, run_id="a")
    spend(first, 10)
    first.close()
    second = open_ledger(path, replace(HEADER, run_id="b", plan=PLAN.with_noise(4.0)))
    spend(second, 20)
    assert second.history() == ((0.025, 2.0, 10), (0.025, 4.0, 20))
    assert second.epsilon() == epsilon([(0.025, 2.0, 10), (0.025, 4.0, 20)], PLAN.delta)
    second.close()


def test_runs_on_other_data_sets_do_not(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    first = open_at(path, run_id="a", dataset="faces")
    spend(first, 10)
    first.close()
    second = open_at(path, run_id="b", dataset="digits")
    second.intend()
    assert second.history() == ((0.025, 2.0, 1),)
    second.close()


@pytest.mark.parametrize("sampling", [TruncatedPoisson(max_batch_size=300), Unsampled()], ids=str)
def test_the_sampler_of_an_earlier_run_is_not_forgotten(tmp_path: Path, sampling: TruncatedPoisson | Unsampled) -> None:
    path = tmp_path / "ledger"
    plan = replace(PLAN, sampling=sampling)
    first = open_ledger(path, replace(HEADER, plan=plan))
    spend(first, 50)
    first.close()
    second = open_at(path, run_id="b")
    assert second.epsilon() == plan.epsilon > PLAN.epsilon
    second.close()


@pytest.mark.parametrize("path_kind", ["memory", "file"])
def test_seeded_noise_gives_no_guarantee(tmp_path: Path, path_kind: str) -> None:
    path = None if path_kind == "memory" else tmp_path / "ledger"
    ledger = open_ledger(path, replace(HEADER, noise_source=NoiseOrigin.SEEDED))
    assert ledger.epsilon() == 0.0
    ledger.intend()
    assert math.isinf(ledger.epsilon())
    assert ledger.history() == ((0.025, 2.0, 1),)
    ledger.close()


# Resuming -------------------------------------------------------------------


def test_a_resumed_run_keeps_what_was_charged_after_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = open_at(path)
    spend(ledger, 5)
    head = ledger.head
    spend(ledger, 3)
    del ledger  # as a crash does: nothing is closed
    resumed = open_at(path, resume=head, run_id="another")
    assert resumed.header.run_id == "run-1"
    assert resumed.num_intents == 8
    assert resumed.intend() == 9
    assert len(resumed.history()) == 1
    resumed.close()


def test_a_head_survives_a_checkpoint_made_of_plain_values(tmp_path: Path) -> None:
    ledger = open_at(tmp_path / "ledger")
    spend(ledger, 2)
    head = ledger.head
    ledger.close()
    resumed = open_at(tmp_path / "ledger", resume=Head(**asdict(head)))
    assert resumed.num_intents == 2
    resumed.close()


def test_a_resumed_run_may_be_given_more_steps(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = open_at(path)
    spend(ledger, 50)
    head = ledger.head
    ledger.close()
    longer = open_ledger(path, replace(HEADER, plan=replace(PLAN, num_steps=60)), resume=head)
    spend(longer, 10)
    with pytest.raises(BudgetError, match="step 61"):
        longer.intend()
    longer.close()
    assert read_ledger(path).runs[0].header.num_steps == 60


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        (replace(HEADER, plan=PLAN.with_noise(1.0)), "noise_multiplier"),
        (replace(HEADER, plan=replace(PLAN, expected_batch_size=100)), "expected_batch_size"),
        (replace(HEADER, plan=replace(PLAN, num_examples=9_000)), "num_examples"),
        (replace(HEADER, plan=replace(PLAN, sampling=Unsampled())), "sampling"),
        (replace(HEADER, clip_norm=2.0), "clip_norm"),
        (replace(HEADER, method="Grape"), "method"),
        (replace(HEADER, dataset="faces"), "dataset"),
        (replace(HEADER, noise_source=NoiseOrigin.SEEDED), "noise_source"),
    ],
)
def test_a_resumed_run_must_release_what_it_did_before(tmp_path: Path, changed: object, name: str) -> None:
    path = tmp_path / "ledger"
    ledger = open_at(path)
    head = ledger.head
    ledger.close()
    with pytest.raises(LedgerError, match=f"{name}="):
        open_ledger(path, changed, resume=head)  # pyright: ignore[reportArgumentType]
    open_at(path, resume=head).close()  # the refusal let the file go


def test_a_checkpoint_of_another_ledger_is_refused(tmp_path: Path) -> None:
    ledger = open_at(tmp_path / "one")
    spend(ledger, 2)
    head = ledger.head
    ledger.close()
    other = open_at(tmp_path / "two", run_id="run-2")
    spend(other, 5)
    other.close()
    with pytest.raises(LedgerError, match="not the ledger"):
        open_at(tmp_path / "two", resume=head)


def test_a_checkpoint_names_a_run_that_the_ledger_must_hold(tmp_path: Path) -> None:
    ledger = open_at(tmp_path / "ledger")
    head = replace(ledger.head, run_id="run-9")
    ledger.close()
    with pytest.raises(LedgerError, match="has no run run-9"):
        open_at(tmp_path / "ledger", resume=head)


def test_memory_and_disk_are_not_confused_on_resuming(tmp_path: Path) -> None:
    in_memory = open_ledger(None, HEADER)
    spend(in_memory, 3)
    on_disk = open_at(tmp_path / "ledger")
    head = on_disk.head
    on_disk.close()
    assert open_ledger(None, HEADER, resume=in_memory.head).intend() == 4
    with pytest.raises(LedgerError, match="without a ledger on disk"):
        open_at(tmp_path / "ledger", resume=in_memory.head)
    with pytest.raises(LedgerError, match="none was given"):
        open_ledger(None, HEADER, resume=head)


# Other processes ------------------------------------------------------------


def test_two_writers_are_refused(tmp_path: Path) -> None:
    ledger = open_at(tmp_path / "ledger")
    with pytest.raises(LedgerError, match="in use"):
        open_at(tmp_path / "ledger", run_id="b")
    ledger.close()
    open_at(tmp_path / "ledger", run_id="b").close()


def test_a_forked_child_can_neither_charge_nor_unlock(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = open_at(path, reserve=5)
    ledger.intend()
    child = os.fork()
    if child == 0:
        verdict = 1
        try:
            ledger.intend()
        except LedgerError as error:
            verdict = 0 if "fork" in str(error) else 2
        ledger.close()
        os._exit(verdict)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(LedgerError, match="in use"):
        open_at(path, run_id="b")
    assert ledger.intend() == 2
    assert read_ledger(path).runs[0].num_intents == 5
    ledger.close()


def test_a_worker_that_outlives_its_parent_does_not_hold_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = open_at(path)
    wake, sleep = os.pipe()
    heard, say = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.close(sleep)
        os.write(say, b"up")
        os.read(wake, 1)
        os._exit(0)
    os.close(wake)
    assert os.read(heard, 2) == b"up"
    del ledger  # the parent is gone, the worker is not
    open_at(path, run_id="b").close()
    for descriptor in (sleep, heard, say):
        os.close(descriptor)
    os.waitpid(worker, 0)


def test_what_a_fork_does_first_ends_every_ledger_that_it_inherits(tmp_path: Path) -> None:
    # Called in this process, where a measure of coverage sees it; the tests above fork.
    ledger = open_at(tmp_path / "ledger")
    ledger.intend()
    _let_go_in_child()
    with pytest.raises(LedgerError, match="is a fork"):
        ledger.intend()
    assert read_ledger(tmp_path / "ledger").runs[0].num_intents == 1


# Faults ---------------------------------------------------------------------


def test_a_full_disk_grants_nothing_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger"
    ledger = open_at(path)
    spend(ledger, 2)
    real, room = os.pwrite, [50]

    def full(descriptor: int, data: bytes, offset: int) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(descriptor, bytes(data[: room[0]]), offset)
        room[0] -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(LedgerError, match="No space left"):
            ledger.intend()
    assert ledger.num_intents == 2
    assert ledger.intend() == 3
    ledger.close()
    assert read_ledger(path).runs[0].num_intents == 3


def test_a_failed_sync_ends_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = open_at(tmp_path / "ledger")
    spend(ledger, 2)

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr("lowkey.account.log_file._sync", fail)
        with pytest.raises(LedgerError, match="could not be written"):
            ledger.intend()
    with pytest.raises(LedgerError, match="failed to store"):
        ledger.intend()
    ledger.close()
    assert read_ledger(tmp_path / "ledger").runs[0].num_intents >= 2


def test_a_full_disk_that_cannot_be_mended_ends_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger"
    ledger = open_at(path)
    spend(ledger, 2)
    real = os.pwrite

    def half(descriptor: int, data: bytes, offset: int) -> int:
        real(descriptor, bytes(data[:30]), offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail(*args: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", half)
        patch.setattr(os, "ftruncate", fail)
        with pytest.raises(LedgerError, match="No space left"):
            ledger.intend()
    with pytest.raises(LedgerError, match="left unfinished"):
        ledger.intend()
    ledger.close()
    assert read_ledger(path).runs[0].num_intents == 3


@pytest.mark.parametrize("moment", ["before the sync", "after the sync"])
def test_an_interrupt_while_recording_leaves_the_ledger_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    path = tmp_path / "ledger"
    ledger = open_at(path)
    spend(ledger, 2)
    real = os.fsync

    def interrupt(descriptor: int) -> None:
        if moment == "after the sync":
            real(descriptor)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("lowkey.account.log_file._sync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ledger.intend()
    assert ledger.intend() == 3
    ledger.close()
    assert read_ledger(path).runs[0].num_intents == 3


def test_an_interrupt_between_the_record_and_its_bookkeeping_ends_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger"
    ledger = open_at(path)
    spend(ledger, 2)

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("lowkey.account.file_ledger._State", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ledger.intend()
    with pytest.raises(LedgerError, match="interrupted"):
        ledger.intend()
    ledger.close()
    assert read_ledger(path).runs[0].num_intents == 3


def test_a_file_that_something_else_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = open_at(path, reserve=5)
    ledger.intend()
    with path.open("ab") as other:
        other.write(b"x")
    with pytest.raises(LedgerError, match="something else changed it"):
        ledger.intend()
    ledger.close()


def test_closing_a_changed_file_says_so_and_still_lets_go(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = open_at(path)
    ledger.intend()
    with path.open("ab") as other:
        other.write(b"x")
    with pytest.raises(LedgerError, match="something else changed it"):
        ledger.close()
    reopened = open_at(path, run_id="b")
    assert reopened.history() == ((0.025, 2.0, 2), (0.025, 2.0, 0))
    reopened.close()


@pytest.mark.parametrize("replacement", [None, b"another"])
def test_a_file_that_was_removed_or_replaced_is_refused(tmp_path: Path, replacement: bytes | None) -> None:
    path = tmp_path / "ledger"
    ledger = open_at(path)
    path.unlink()
    if replacement is not None:
        path.write_bytes(replacement)
    with pytest.raises(LedgerError, match=r"removed|replaced"):
        ledger.intend()
    ledger.close()


def test_a_folder_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="cannot be opened"):
        open_at(tmp_path)
    with pytest.raises(LedgerError, match="cannot be read"):
        read_ledger(tmp_path / "missing")


def test_an_unlockable_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", fail)
    with pytest.raises(LedgerError, match="local disk"):
        open_at(tmp_path / "ledger")


def test_a_header_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="too long"):
        open_at(tmp_path / "ledger", dataset="x" * 70_000)


def test_a_file_that_is_replaced_while_it_is_opened_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger"
    monkeypatch.setattr("fcntl.flock", lambda descriptor, operation: path.unlink())
    with pytest.raises(LedgerError, match="replaced while it was opened"):
        open_at(path)


def test_a_header_names_the_versions_that_made_the_run() -> None:
    assert {"python", "lowkey", "dp-accounting"} <= set(RunHeader(plan=PLAN).versions)


def test_a_header_says_so_where_lowkey_runs_without_being_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", find)
    _versions.cache_clear()
    try:
        assert RunHeader(plan=PLAN).versions["lowkey"] == "not installed"
    finally:
        _versions.cache_clear()


# Reading --------------------------------------------------------------------


def test_a_report_reads_well_while_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = open_at(path)
    spend(ledger, 50)
    text = str(read_ledger(path))
    assert "run-1  DPSGD on 'digits': 50 of 50 releases charged, 49 committed; Poisson, q = 0.025, σ = 2" in text
    assert f"all runs on 'digits': (ε = {format_up(PLAN.epsilon)}, δ = 1e-05), PLD" in text
    ledger.close()
    with path.open("ab") as other:
        other.write(b"0000")
    assert "unfinished record, charged" in str(read_ledger(path))
    assert "51 of 50 releases charged, 1 of them for a broken record" in str(read_ledger(path))


def test_a_ledger_never_holds_more_than_public_facts(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = open_at(path)
    spend(ledger, 2)
    ledger.close()
    fields = {name for record in scan(path.read_bytes(), "").records for name in record.body}
    frame = {"kind", "format", "version", "run", "reserve", "step", "count", "committed", "unused"}
    plan = {"num_examples", "expected_batch_size", "sampling_rate", "noise_multiplier", "delta", "num_steps", "sampling"}
    assert fields == frame | plan | {"run_id", "dataset", "clip_norm", "relation", "method", "noise_source", "versions"}


# Steps that are taken again --------------------------------------------------

SHUFFLED = replace(PLAN, num_examples=100, expected_batch_size=10, num_steps=60, sampling=Unsampled())


def _joined(passes: list[tuple[int, int]]) -> int:
    """Return the most often that one example can join when these stretches of steps are taken, by trying every example's places.

    An example has one place in each epoch of ten steps; the worst one has it wherever most passes go through.
    """
    last = max(stop for _, stop in passes)
    return sum(
        max(sum(start <= step < stop for start, stop in passes) for step in range(epoch, epoch + 10)) for epoch in range(0, last, 10)
    )


@pytest.mark.parametrize(
    "stretches",
    [
        [(0, 5), (0, 5)],
        [(0, 10), (9, 11)],
        [(0, 5), (0, 5), (0, 5)],
        [(0, 12), (8, 12), (9, 14)],
        [(0, 5), (0, 8), (3, 9)],
        [(0, 25), (3, 30)],
    ],
    ids=str,
)
def test_shuffled_steps_that_are_redone_from_a_checkpoint_are_charged_again(tmp_path: Path, stretches: list[tuple[int, int]]) -> None:
    path, header = tmp_path / "ledger", replace(HEADER, plan=SHUFFLED)
    ledger = open_ledger(path, header)
    heads = {0: ledger.head}
    for number, (start, stop) in enumerate(stretches):
        if number:
            ledger = open_ledger(path, header, resume=heads[start])
        for step in range(start, stop):
            ledger.intend()
            heads[step + 1] = ledger.head
        charged = ledger.epsilon()
        ledger.close()
    assert charged >= epsilon([(1.0, SHUFFLED.noise_multiplier, _joined(stretches))], SHUFFLED.delta) * (1 - 1e-9)
    assert read_ledger(path).bound("digits", SHUFFLED.delta).epsilon == charged
    fresh = open_ledger(path, replace(header, run_id="run-2"))
    assert fresh.epsilon() == charged
    fresh.close()


def test_a_shuffled_run_that_resumes_where_it_stopped_costs_what_an_uninterrupted_one_does(tmp_path: Path) -> None:
    path, header = tmp_path / "ledger", replace(HEADER, plan=SHUFFLED)
    ledger = open_ledger(path, header)
    spend(ledger, 7)
    head = ledger.head
    ledger.close()
    resumed = open_ledger(path, header, resume=head)
    spend(resumed, 3)
    assert resumed.epsilon() == SHUFFLED.epsilon_after(10)
    resumed.close()
