"""Bring docs/benchmarks.md and its figures up to date with benchmarks/results.

python benchmarks/page.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from plots import draw_size, draw_steps
from tables import size_table, table

ROOT = Path(__file__).resolve().parent.parent


def fill(page: str, name: str, text: str) -> str:
    """Replace what stands between the two markers of `name`."""
    pattern = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end of {name} -->)", re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"the page has no markers <!-- {name} --> and <!-- end of {name} -->. Add them where the numbers belong.")
    return pattern.sub(lambda _: f"\n{text}\n\n", page, count=1)


def steps_text(result: dict[str, Any]) -> str:
    """Return the machine in a sentence, and each workload's table."""
    parts = [_machine(result["machine"]), _rounds(result)]
    for measured in result["workloads"].values():
        parts += ["", measured["title"][:1].upper() + measured["title"][1:] + ":", "", table(measured["summary"])]
    return "\n".join(parts)


def _rounds(result: dict[str, Any]) -> str:
    counts = sorted({len(taken) for measured in result["workloads"].values() for taken in measured["time"].values()})
    if counts:
        return f"Times are medians of {' to '.join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))} rounds."
    return "Memory alone: no time has been taken on a machine that was free."


def size_text(result: dict[str, Any]) -> str:
    """Return the machine in a sentence, and the table of batch sizes."""
    billions = [f"{result[key] / 1e9:.2f} billion" for key in ("parameters", "trained")]
    counts = f"{billions[0]} parameters, {billions[1]} trained, `Grape(rank={result['rank']})`."
    return "\n".join([_machine(result["machine"]), counts, "", size_table(result)])


def _machine(machine: dict[str, Any]) -> str:
    place = machine.get("gpu", f"{machine['cores']} cores of an {machine['processor']}, {machine['threads']} threads")
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "transformers", "opacus") if name in machine)
    load = machine["load_average"][0]
    busy = f" The machine was shared: its load average was {load} at the start." if load > machine["cores"] / 2 else ""
    return f"{place}; float32; {versions}.{busy}"


def main() -> int:
    """Fill in whatever results there are."""
    path = ROOT / "docs" / "benchmarks.md"
    page = path.read_text(encoding="utf-8")
    texts = {"cpu": (steps_text, draw_steps), "size": (size_text, draw_size), "cuda": (steps_text, draw_steps)}
    for name, (describe, draw) in texts.items():
        source = ROOT / "benchmarks" / "results" / f"{name}.json"
        if source.exists():
            result = json.loads(source.read_text(encoding="utf-8"))
            page = fill(page, name, describe(result))
            draw(result, ROOT / "docs" / "images" / f"benchmark-{name}.svg")
    path.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
