"""A process that dies at any moment never leaves a ledger that charges less than what it did."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import lowkey.account
from lowkey.account import Head, Plan, RunHeader, open_ledger, read_ledger

PLAN = Plan(noise_multiplier=1.0, delta=1e-6, num_examples=1000, expected_batch_size=10, num_steps=1_000_000)
NUM_KILLS = 100

# The nursery loads lowkey.account without lowkey itself, hence without torch, and forks: a life starts within a millisecond.
NURSERY = """
import os, sys, types
package = types.ModuleType("lowkey")
package.__path__ = [sys.argv[1]]
sys.modules["lowkey"] = package
import lowkey.account.file_ledger
from lowkey.account import Head, Plan, RunHeader, open_ledger
plan = Plan(noise_multiplier=1.0, delta=1e-6, num_examples=1000, expected_batch_size=10, num_steps=1_000_000)
versions = RunHeader(plan=plan).versions
for line in sys.stdin:
    path, reserve, run_id, records, chain, intents = line.split()
    child = os.fork()
    if child == 0:
        resume = None if run_id == "-" else Head(run_id=run_id, num_records=int(records), chain=chain, num_intents=int(intents))
        ledger = open_ledger(path, RunHeader(plan=plan, versions=versions), reserve=int(reserve), resume=resume)
        head = ledger.head
        os.write(1, f"open {head.run_id} {head.num_records} {head.chain} {head.num_intents}\\n".encode())
        while True:
            step = ledger.intend()
            os.write(1, f"step {step}\\n".encode())
            ledger.commit(step)
    os.write(1, f"born {child}\\n".encode())
    os.waitpid(child, 0)
    os.write(1, b"dead\\n")
"""


class Nursery:
    """Starts children that make releases as fast as they can, and kills each at a random moment, while it opens its ledger or later."""

    def __init__(self) -> None:
        source = str(Path(lowkey.account.__file__).parents[1])
        command = [sys.executable, "-c", NURSERY, source]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def live_and_die(
        self, path: Path, reserve: int, head: Head | None, seconds: float, *, since_release: bool = False
    ) -> tuple[Head | None, int]:
        """Return the head that the child reported on opening, and the last release that it reported as granted (0 if none).

        The child has `seconds` from its birth, or from its first release: on a busy machine the one does not tell of the other.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        facts = "- 0 - 0" if head is None else f"{head.run_id} {head.num_records} {head.chain} {head.num_intents}"
        self.process.stdin.write(f"{path} {reserve} {facts}\n".encode())
        self.process.stdin.flush()
        opened, reported, child, is_killed = head, 0, 0, False
        while (words := self.process.stdout.readline().decode().split()) != ["dead"] or not is_killed:
            match words:
                case ["born", pid]:
                    child = int(pid)
                case ["open", run_id, records, chain, intents]:
                    opened = Head(run_id=run_id, num_records=int(records), chain=chain, num_intents=int(intents))
                case ["step", step]:
                    reported = int(step)
                case _:
                    raise AssertionError(f"the child failed before it was killed: {words}")
            if child and not is_killed and (reported or not since_release):
                time.sleep(seconds)
                os.kill(child, signal.SIGKILL)
                is_killed = True
        return opened, reported

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@pytest.mark.parametrize("reserve", [1, 7])
def test_a_killed_process_never_leaves_too_small_a_count(tmp_path: Path, nursery: Nursery, reserve: int) -> None:
    moments = random.Random(reserve)
    num_lives_with_releases = 0
    for life in range(NUM_KILLS):
        if life % 10 == 0:  # a new file, so that some die while making it, and reading stays quick
            path, head, charged = tmp_path / f"{life}" / "ledger", None, 0
        head, reported = nursery.live_and_die(path, reserve, head, moments.uniform(0.0, 0.04), since_release=life % 2 == 1)
        before, charged = charged, sum(run.num_intents for run in read_ledger(path).runs[-1:]) if path.exists() else 0
        assert charged >= max(reported, before)
        # What nobody was told of is the append under way, and the one before it if its report was not yet written.
        assert charged <= max(reported, before) + 2 * reserve
        num_lives_with_releases += reported > 0
    assert num_lives_with_releases >= NUM_KILLS // 2


def test_a_run_that_was_killed_composes_with_the_next(tmp_path: Path, nursery: Nursery) -> None:
    path = tmp_path / "ledger"
    _, first = nursery.live_and_die(path, 1, None, 0.1, since_release=True)
    _, second = nursery.live_and_die(path, 1, None, 0.1, since_release=True)
    with_third = open_ledger(path, RunHeader(plan=PLAN))
    counts = [steps for _, _, steps in with_third.history()]
    with_third.close()
    assert len(counts) == 3
    assert counts[0] >= first > 0
    assert counts[1] >= second > 0
