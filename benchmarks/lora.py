"""Measure a private step on adapters: lowkey's LoRA beside Opacus on the same adapters made by PEFT.

    python benchmarks/lora.py                                  # a BERT-shaped encoder of 6 × 384, rank 16
    python benchmarks/lora.py --workload encoder-tiny --rounds 2 --skip-memory
    python benchmarks/lora.py --out results.json

Needs PEFT: pip install --no-deps peft accelerate
All train adapters of every linear layer but the classifier, and the classifier in full; everything else is frozen.
Contenders take turns in one process, and a ratio is the median over rounds of the ratio within a round.
Memory is the resident peak above the idle process, of a process for each contender.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import memory
import torch
from contenders import CLIP_NORM, CONTENDERS, LEARNING_RATE, NOISE_MULTIPLIER, Step
from machine import describe_machine
from measuring import MEMORY_ENVIRONMENT
from torch import Tensor
from torch.nn import functional as F
from workloads import WORKLOADS, Materials

import lowkey as lk

MEMORY_STEPS = 3
REFERENCE = "PEFT, Opacus with hooks"


def _with_peft(start: Callable[[Materials], Step]) -> Callable[[Materials, int], Step]:
    """Give a contender the model with adapters that PEFT has put in."""

    def begin(materials: Materials, rank: int) -> Step:
        from peft import LoraConfig, TaskType, get_peft_model

        config = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", task_type=TaskType.SEQ_CLS)
        materials.model.requires_grad_(True)
        model: Any = get_peft_model(materials.model, config)
        return start(Materials(model=model, inputs=materials.inputs, labels=materials.labels, first=materials.first))

    return begin


def _is_trained(name: str, weight: Tensor) -> bool:
    return "classifier" in name or (weight.dim() == 2 and "embeddings" not in name)


def _lowkey(materials: Materials, rank: int, *, freeze_a: bool) -> Step:
    examples = len(materials.labels)
    plan = lk.Plan(
        noise_multiplier=NOISE_MULTIPLIER, delta=1e-5, num_examples=100 * examples, expected_batch_size=examples, num_steps=10_000
    )
    method = lk.LoRA(rank=rank, freeze_a=freeze_a, whole=("classifier",))
    optimizer = functools.partial(torch.optim.AdamW, lr=LEARNING_RATE, fused=True)
    private = lk.privatize(materials.model, optimizer, method=method, plan=plan, clip_norm=CLIP_NORM, trainable=_is_trained)

    def step() -> None:
        private.backward(F.cross_entropy(materials.logits(), materials.labels, reduction="none"))
        private.step()

    return step


STARTS: dict[str, Callable[[Materials, int], Step]] = {
    "PEFT, ordinary training": _with_peft(CONTENDERS["fused"].start),
    REFERENCE: _with_peft(CONTENDERS["opacus-hooks"].start),
    "PEFT, Opacus with ghost clipping": _with_peft(CONTENDERS["opacus-ghost"].start),
    "PEFT, lowkey DPSGD()": _with_peft(CONTENDERS["dpsgd"].start),
    "lowkey LoRA": functools.partial(_lowkey, freeze_a=False),
    "lowkey LoRA, frozen A": functools.partial(_lowkey, freeze_a=True),
}


def build(name: str, options: argparse.Namespace) -> Step:
    """Build the model anew, and attach the contender of that name."""
    materials = WORKLOADS[options.workload].materials("cpu")
    return STARTS[name](materials, options.rank)


def times(options: argparse.Namespace) -> dict[str, list[float]]:
    """Let the contenders take turns."""
    steps = {name: build(name, options) for name in options.contenders}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    clock = time.process_time if options.clock == "processor" else time.perf_counter
    for turn in range(options.rounds + 1):
        for name, step in steps.items():
            start = clock()
            step()
            if turn:
                seconds[name].append(clock() - start)
    return seconds


def peak(name: str, options: argparse.Namespace) -> int:
    """Return the resident peak of a few steps above the idle process, taken in a process of its own."""
    command = [sys.executable, "-W", "ignore", __file__, "--peak-of", name, "--workload", options.workload, "--rank", str(options.rank)]
    done = subprocess.run(
        [*command, "--threads", str(options.threads)], check=True, capture_output=True, text=True, env={**os.environ, **MEMORY_ENVIRONMENT}
    )
    return int(done.stdout.split()[-1])


def print_peak(options: argparse.Namespace) -> None:
    """Take a few steps and print their peak."""
    import opacus  # noqa: F401 # reason: loaded before memory is called idle, as are the other libraries
    import peft  # noqa: F401 # reason: as above

    materials = WORKLOADS[options.workload].materials("cpu")
    idle = memory.resident_bytes()
    memory.reset_peak()
    step = STARTS[options.peak_of](materials, options.rank)
    for _ in range(MEMORY_STEPS):
        step()
    print(memory.peak_bytes() - idle)


def summarise(seconds: dict[str, list[float]], peaks: dict[str, int]) -> dict[str, dict[str, float]]:
    """Return medians, and ratios to the reference where it took part."""
    rows: dict[str, dict[str, float]] = {}
    for name, taken in seconds.items():
        rows[name] = {"seconds": median(taken)}
        if REFERENCE in seconds:
            rows[name]["ratio"] = median(mine / theirs for mine, theirs in zip(taken, seconds[REFERENCE], strict=True))
        if name in peaks:
            rows[name]["peak"] = peaks[name]
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for."""
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    if options.peak_of:
        print_peak(options)
        return 0
    machine = describe_machine("cpu", options.threads)
    seconds = times(options)
    rows = summarise(seconds, {} if options.skip_memory else {name: peak(name, options) for name in options.contenders})
    print(f"\n{WORKLOADS[options.workload].title}; adapters of rank {options.rank}; {options.clock} time\n")
    print(_table(rows), flush=True)
    if options.out:
        result = {"machine": machine, "rank": options.rank, "clock": options.clock, "seconds": seconds, "summary": rows}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def _table(rows: dict[str, dict[str, float]]) -> str:
    lines = ["| | time of a step | ratio to Opacus | memory |", "|---|---:|---:|---:|"]
    for name, row in rows.items():
        ratio = f"{row['ratio']:.2f}" if "ratio" in row else ""
        held = f"{row['peak'] / 2**20:.0f} MB" if "peak" in row else ""
        lines.append(f"| {name} | {row['seconds']:.2f} s | {ratio} | {held} |")
    return "\n".join(lines)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=[name for name in WORKLOADS if name.startswith("encoder")], default="encoder")
    parser.add_argument("--contenders", nargs="+", choices=STARTS, default=list(STARTS))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count")
    parser.add_argument("--clock", choices=["processor", "wall"], default="wall")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--skip-memory", action="store_true")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="a JSON file for every sample")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
