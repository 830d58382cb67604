"""Measure contenders against each other: time in turns, memory one after the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from worker import Turn
from workloads import WORKLOADS

# Buffers above this size are mapped and unmapped one by one, so that what is freed leaves the process and the peak shows what was needed.
MEMORY_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "131072"}

# What is freed stays in the process. Otherwise glibc returns some of it and not the rest, by rules that the order of sizes decides,
# and the pages that come back one by one have been seen to make the same step a third slower in one process than in the next.
TIME_ENVIRONMENT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to measure.

    Fields:
        rounds: Rounds that count; in each one every contender has a turn.
        warm_up: Steps before that, which do not count for time.
        memory_steps: Steps whose peak counts, the first one included.
        threads: Threads of each process.
        device: "cpu" or "cuda".
        keeps_memory: Whether processes keep freed memory while time is taken; otherwise the allocator does as it does by default.
    """

    rounds: int
    warm_up: int
    memory_steps: int
    threads: int
    device: str
    keeps_memory: bool = True


class Worker:
    """A process that holds one contender; it works only while it has its turn.

    Life cycle: `wait`, then `turn` as often as wanted, then `close`; or `with`.
    """

    def __init__(self, workload: str, contender: str, settings: Settings, environment: dict[str, str] | None = None) -> None:
        here = Path(__file__).resolve().parent
        command = [sys.executable, "-W", "ignore", str(here / "worker.py"), workload, contender]
        command += ["--device", settings.device, "--threads", str(settings.threads)]
        paths = [str(here.parent / "src"), os.environ.get("PYTHONPATH", "")]
        chosen = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(settings.threads)}
        self._name = f"{contender} on {workload}"
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8", env={**os.environ, **chosen, **(environment or {})}
        )
        self.idle = 0

    def wait(self) -> None:
        """Return when it is ready for its first turn."""
        self.idle = self._read()["idle"]

    def turn(self) -> Turn:
        """Let it take one step."""
        assert self._process.stdin is not None
        print("step", file=self._process.stdin, flush=True)
        return Turn(**self._read())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        if self._process.poll() is None:
            print("quit", file=self._process.stdin, flush=True)
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _read(self) -> dict[str, int]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self._name} ended with status {self._process.wait()}. Its own message stands above.")
        return json.loads(line)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What a contender holds above the idle process, in bytes.

    Fields:
        idle: Held with libraries loaded and model and batch in place.
        first: Peak of the first step above idle; it may allocate state and run checks.
        later: Peak of the other steps above idle.
    """

    idle: int
    first: int
    later: int

    @property
    def peak(self) -> int:
        """The most that any step took above idle."""
        return max(self.first, self.later)

    @classmethod
    def from_peaks(cls, idle: int, peaks: Sequence[int]) -> Self:
        """Sum up the peaks of consecutive steps, the first step's first."""
        above = [peak - idle for peak in peaks]
        return cls(idle=idle, first=above[0], later=max(above[1:], default=above[0]))


@dataclass(frozen=True, kw_only=True)
class Race:
    """What the turns of one workload gave.

    Fields:
        turns: Each contender's turns, one for each round.
        memory: Peaks over all steps, warm-up included, under whatever allocator the process has.
    """

    turns: dict[str, list[Turn]]
    memory: dict[str, Memory]


def measure_time(workload: str, contenders: Sequence[str], settings: Settings) -> Race:
    """Give every contender its turn in each round, starting with another one each time."""
    workers: dict[str, Worker] = {}
    turns: dict[str, list[Turn]] = {name: [] for name in contenders}
    peaks: dict[str, list[int]] = {name: [] for name in contenders}
    try:
        environment = TIME_ENVIRONMENT if settings.keeps_memory else None
        workers = {name: Worker(workload, name, settings, environment) for name in contenders}
        for worker in workers.values():
            worker.wait()
        for name in contenders:
            peaks[name] += [workers[name].turn().peak for _ in range(settings.warm_up)]
        for round_number in range(settings.rounds):
            shift = round_number % len(contenders)
            for name in [*contenders[shift:], *contenders[:shift]]:
                # The first steps of a turn bring the contender's memory back into the caches.
                taken = [workers[name].turn() for _ in range(WORKLOADS[workload].steps_per_turn)]
                turns[name].append(taken[-1])
                peaks[name] += [turn.peak for turn in taken]
    finally:
        for worker in workers.values():
            worker.close()
    return Race(turns=turns, memory={name: Memory.from_peaks(workers[name].idle, peaks[name]) for name in contenders})


def measure_memory(workload: str, contender: str, settings: Settings) -> Memory:
    """Run a few steps in a process of their own and return the peaks."""
    with Worker(workload, contender, settings, MEMORY_ENVIRONMENT) as worker:
        worker.wait()
        return Memory.from_peaks(worker.idle, [worker.turn().peak for _ in range(settings.memory_steps)])
