"""Measure a private training step beside an ordinary one.

    python benchmarks/run.py                                  # every contender on all of them
    python benchmarks/run.py --quick                          # a first impression
    python benchmarks/run.py --workloads encoder --contenders fused grape --rounds 9

Contenders take turns, one step at a time, each in a process of its own that sleeps while others work.
Memory is measured separately, one process after the other.
Prints a table, and with --out writes every sample as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from contenders import CONTENDERS, REFERENCES
from machine import describe_machine
from measuring import Race, Settings, measure_memory, measure_time
from tables import summarise, table
from workloads import WORKLOADS

DEFAULT_WORKLOADS = ["encoder", "resnet", "resnet-wide"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for."""
    options = _parse(arguments)
    settings = Settings(
        rounds=options.rounds,
        warm_up=options.warm_up,
        memory_steps=options.memory_steps,
        threads=options.threads,
        device=options.device,
        keeps_memory=not options.default_allocator,
    )
    if options.quick:
        settings = replace(settings, rounds=2, warm_up=1, memory_steps=2)
    result: dict[str, Any] = {"machine": describe_machine(settings.device, settings.threads), "settings": asdict(settings), "workloads": {}}
    for name in options.workloads:
        result["workloads"][name] = measured = _measure(name, options, settings)
        print(f"\n{WORKLOADS[name].title}\n\n{table(measured['summary'])}\n", flush=True)
        result["machine"]["load_average_after"] = [round(load, 2) for load in os.getloadavg()]
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def _measure(workload: str, options: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    race = Race(turns={}, memory={}) if options.skip_time else measure_time(workload, options.contenders, settings)
    turns, memory = race.turns, race.memory
    if options.skip_memory:
        memory = {}
    elif settings.device == "cpu" or options.skip_time:
        # A graphics card counts its own allocations, so there the turns have told; here the allocator must be set for it.
        memory = {name: measure_memory(workload, name, settings) for name in options.contenders}
    return {
        "title": WORKLOADS[workload].title,
        "time": {name: [asdict(turn) for turn in taken] for name, taken in turns.items()},
        "memory": {name: asdict(held) for name, held in memory.items()},
        "summary": summarise(turns, memory),
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    needed = f"ratios need one of {', '.join(REFERENCES)}"
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=DEFAULT_WORKLOADS)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help=needed)
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count")
    parser.add_argument("--warm-up", type=int, default=2, help="steps that do not count for time")
    parser.add_argument("--memory-steps", type=int, default=3, help="steps whose peak counts")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--quick", action="store_true", help="two rounds, one step of warm-up")
    parser.add_argument("--default-allocator", action="store_true", help="take time with the allocator as it is by default")
    parser.add_argument("--skip-time", action="store_true")
    parser.add_argument("--skip-memory", action="store_true")
    parser.add_argument("--out", type=Path, help="a JSON file for every sample")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
