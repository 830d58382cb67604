"""From samples to medians, from medians to ratios, from ratios to a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from contenders import CONTENDERS, REFERENCES
from measuring import Memory
from worker import Turn

Row = dict[str, Any]


def summarise(turns: Mapping[str, Sequence[Turn]], memory: Mapping[str, Memory]) -> dict[str, Row]:
    """Return medians and ratios for each contender.

    The reference of each measure is the better of the two ordinary optimizers in that measure.
    A ratio of times is the median over rounds of the ratio within a round, so that a load that comes and goes hits both sides.
    """
    rows: dict[str, Row] = {name: {"title": CONTENDERS[name].title} for name in [*turns, *(name for name in memory if name not in turns)]}
    for measure in ("cpu_s", "wall_s"):
        samples = {name: [getattr(turn, measure) for turn in taken] for name, taken in turns.items()}
        reference = _best({name: median(values) for name, values in samples.items()})
        for name, values in samples.items():
            rows[name][measure] = median(values)
            if reference is not None:
                ratios = [mine / theirs for mine, theirs in zip(values, samples[reference], strict=True)]
                rows[name][measure.replace("_s", "_ratio")] = median(ratios)
                rows[name][measure.replace("_s", "_ratio_range")] = [min(ratios), max(ratios)]
    reference = _best({name: held.peak for name, held in memory.items()})
    for name, held in memory.items():
        rows[name].update(asdict(held), peak=held.peak)
        if reference is not None:
            rows[name]["memory_ratio"] = held.peak / memory[reference].peak
            rows[name]["memory_ratio_later"] = held.later / memory[reference].later
    return rows


def _best(values: Mapping[str, float]) -> str | None:
    """Return the ordinary contender with the smallest value."""
    return min((name for name in REFERENCES if name in values), key=values.__getitem__, default=None)


_COLUMNS = [
    ("processor time", "cpu_s", "{:.2f} s"),
    ("ratio", "cpu_ratio", "{:.2f}"),
    ("clock time", "wall_s", "{:.2f} s"),
    ("ratio", "wall_ratio", "{:.2f}"),
    ("memory", "peak", "{:.0f} MB"),
    ("ratio", "memory_ratio", "{:.2f}"),
    ("after the first step", "memory_ratio_later", "{:.2f}"),
]


def table(rows: Mapping[str, Row]) -> str:
    """Return a Markdown table."""
    columns = [column for column in _COLUMNS if any(column[1] in row for row in rows.values())]
    lines = ["| |" + "".join(f" {heading} |" for heading, _, _ in columns), "|---|" + "---:|" * len(columns)]
    for row in rows.values():
        cells = [_cell(row.get(key), key, form) for _, key, form in columns]
        lines.append(f"| {row['title']} |" + "".join(f" {cell} |" for cell in cells))
    return "\n".join(lines)


def _cell(value: float | None, key: str, form: str) -> str:
    if value is None:
        return "–"
    if key.endswith("_s") and value < 0.1:
        return f"{value * 1000:.1f} ms"
    return form.format(value / 1e6 if key == "peak" else value)


def size_table(result: Mapping[str, Any]) -> str:
    """Return a Markdown table of what `size.py` measured."""
    headings = ["batch", "clock time", "processor time", "private step, measured", "AdamW, computed", "ratio"]
    lines = [f"| {' | '.join(headings)} |", "|" + "---:|" * len(headings)]
    for batch in result["batches"]:
        peak = max(batch["first_peak"], batch["peak"])
        cells = [f"{batch['examples']} × {result['shape']['tokens']}", f"{batch['seconds']:.1f} s", f"{batch['cpu_seconds']:.1f} s"]
        cells += [f"{peak / 1e9:.2f} GB", f"{batch['adamw'] / 1e9:.2f} GB", f"{peak / batch['adamw']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
