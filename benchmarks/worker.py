"""One contender in a process of its own, which steps when it is told to and says what the step took.

The parent writes one word a line, `step` or `quit`; every answer is one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import TextIO

import memory
import torch
from contenders import CONTENDERS
from workloads import WORKLOADS


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one step took.

    Fields:
        cpu_s: Processor seconds of all threads.
        wall_s: Seconds on the clock.
        peak: Most bytes held during the step: resident, or allocated on the device.
    """

    cpu_s: float
    wall_s: float
    peak: int


class Runner:
    """A contender that is ready to step."""

    def __init__(self, workload: str, contender: str, device: str) -> None:
        self._device = device
        CONTENDERS[contender].load()
        _load_optimizers()
        materials = WORKLOADS[workload].materials(device)
        # Idle: libraries loaded, model and batch in place, nothing attached to them yet.
        self.idle = self._held()
        self._reset_peak()
        self._step = CONTENDERS[contender].start(materials)

    def turn(self) -> Turn:
        """Take one step."""
        cpu, wall = time.process_time(), time.perf_counter()
        self._step()
        self._wait()
        turn = Turn(cpu_s=time.process_time() - cpu, wall_s=time.perf_counter() - wall, peak=self._peak())
        self._reset_peak()
        return turn

    @property
    def _is_cuda(self) -> bool:
        return self._device.startswith("cuda")

    def _wait(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()

    def _held(self) -> int:
        return torch.cuda.memory_allocated() if self._is_cuda else memory.resident_bytes()

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self._is_cuda else memory.peak_bytes()

    def _reset_peak(self) -> None:
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            memory.reset_peak()


def _load_optimizers() -> None:
    """Let torch import what its first optimizer imports: some 70 MB of code, which are no step's memory."""
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])


def serve(runner: Runner, orders: TextIO, answers: TextIO) -> None:
    """Answer until told to quit."""
    print(json.dumps({"idle": runner.idle}), file=answers, flush=True)
    for order in orders:
        if order.strip() == "quit":
            return
        print(json.dumps(asdict(runner.turn())), file=answers, flush=True)


def main() -> None:
    """Serve the contender that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # Answers keep the original output; whatever a library prints goes to the error stream.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(Runner(options.workload, options.contender, options.device), sys.stdin, answers)


if __name__ == "__main__":
    main()
