"""Time and memory of a private training step beside an ordinary one, on the same model and the same random batch.

Time is the median over turns taken alternately, so that other load on the machine hits both.
Memory is how far the resident size of a process of its own rises above idle while it trains.
The batch is made up, so nothing here reads private data.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowkey as lk
from lowkey.cli.text_model import load_text_model, logits
from lowkey.methods import Method

_STATM = Path("/proc/self/statm")
_MEMORY_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one step works on, in words that another process can be started with.

    Fields:
        folder: Where the model lies; MiniLM if None.
        method: `grape` or `dpsgd`; ordinary training if None.
        rank: Grape's rank.
        batch_size: Mails in the batch.
        num_tokens: Tokens per mail.
    """

    folder: str | None
    method: str | None
    rank: int
    batch_size: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a step takes.

    Fields:
        seconds: Median time of one step.
        memory_bytes: Highest resident size above idle; None where the system does not tell.
    """

    seconds: float
    memory_bytes: int | None


def choose_method(name: str, rank: int) -> Method:
    """Return the private method that a command line names."""
    return lk.Grape(rank=rank) if name == "grape" else lk.DPSGD()


def measure(network: nn.Module, private: Workload, *, num_rounds: int, on_turn: Callable[[], None] = lambda: None) -> tuple[Cost, Cost]:
    """Measure one step of ordinary training and one of private training.

    Args:
        network: The classifier; it is copied, not trained.
        private: The private step; the ordinary one takes the same model and batch.
        num_rounds: Timed turns of each kind, after one that is not.
        on_turn: Called `num_rounds + 2` times, as the work goes on.

    Returns:
        The cost of the ordinary step, and of the private one.
    """
    ordinary = replace(private, method=None)
    steps = [make_step(copy.deepcopy(network), workload, num_rounds + 1) for workload in (ordinary, private)]
    seconds = time_in_turns(steps, num_rounds=num_rounds, on_turn=on_turn)
    with ThreadPoolExecutor() as pool:
        memory = list(pool.map(measure_memory, (ordinary, private)))
    on_turn()
    costs = [Cost(seconds=time_, memory_bytes=bytes_) for time_, bytes_ in zip(seconds, memory, strict=True)]
    return costs[0], costs[1]


def time_in_turns(steps: list[Callable[[], None]], *, num_rounds: int, on_turn: Callable[[], None]) -> list[float]:
    """Return the median time of each step, taken in turns after one turn to warm up."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(num_rounds + 1):
        for step, spent in zip(steps, times, strict=True):
            start = time.perf_counter()
            step()
            spent.append(time.perf_counter() - start)
        on_turn()
    return [statistics.median(spent[1:]) for spent in times]


def make_step(network: nn.Module, workload: Workload, num_steps: int) -> Callable[[], None]:
    """Return a function that takes one training step of the given kind with AdamW."""
    ids, mask, labels = _made_up_batch(network, workload)
    factory = functools.partial(torch.optim.AdamW, lr=1e-4)
    if workload.method is None:
        optimizer = factory([parameter for parameter in network.parameters() if parameter.requires_grad])

        def ordinary() -> None:
            F.cross_entropy(logits(network, ids, mask), labels).backward()
            optimizer.step()
            optimizer.zero_grad()

        return ordinary
    # The noise is drawn and the release made as in any run, but of made-up mails: this plan is nobody's guarantee.
    plan = lk.Plan(noise_multiplier=1.0, delta=1e-5, num_examples=10_000, expected_batch_size=len(labels), num_steps=num_steps)
    private = lk.privatize(network, factory, method=choose_method(workload.method, workload.rank), plan=plan, clip_norm=1.0)

    def step() -> None:
        private.backward(F.cross_entropy(logits(network, ids, mask), labels, reduction="none"))
        private.step()

    return step


def _made_up_batch(network: nn.Module, workload: Workload) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (workload.batch_size, workload.num_tokens)
    vocabulary = int(network.config.vocab_size)  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]  # a PreTrainedModel
    ids = torch.randint(vocabulary, shape, generator=generator)
    return ids, torch.ones_like(ids), torch.randint(2, shape[:1], generator=generator)


# -- memory, in a process of its own --------------------------------------------------------------------------------------


def measure_memory(workload: Workload) -> int | None:
    """Return how many bytes above idle a fresh process needs to train as `workload` says, or None if the system does not tell."""
    if not _STATM.exists():
        return None
    # Large blocks go back to the system when they are freed, so that the resident size shows what is in use.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    command = [sys.executable, "-m", "lowkey.cli.step_cost", json.dumps(asdict(workload))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else None


def main() -> None:
    """Print the memory of the workload in the first argument: what `measure_memory` starts."""
    workload = Workload(**json.loads(sys.argv[1]))
    folder = Path(workload.folder) if workload.folder else None
    network = load_text_model(folder, seed=0).network
    ids, mask, _ = _made_up_batch(network, workload)
    with torch.no_grad():
        # Weights are mapped from their file; reading them once makes them resident before idle is taken.
        logits(network, ids[:1], mask[:1])
    gc.collect()
    idle = resident_bytes()
    with watch_resident() as highest:
        step = make_step(network, workload, _MEMORY_STEPS)
        for _ in range(_MEMORY_STEPS):
            step()
    print(highest[0] - idle)


def resident_bytes() -> int:
    """Return the resident size of this process."""
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def watch_resident(period: float = 0.002) -> Generator[list[int]]:
    """Look at the resident size every `period` seconds; the list holds the highest one seen."""
    highest, done = [resident_bytes()], threading.Event()

    def look() -> None:
        while not done.wait(period):
            highest[0] = max(highest[0], resident_bytes())

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield highest
    finally:
        done.set()
        watcher.join()


if __name__ == "__main__":
    main()
