"""The figures of docs/benchmarks.md, drawn from the JSON of run.py and size.py; page.py calls this."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import matplotlib as mpl
from contenders import REFERENCES

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

OURS, OTHERS = "#2b6cb0", "#a0aec0"


def draw_steps(result: dict[str, Any], out: Path) -> None:
    """Draw each workload's ratios of time and memory as bars, ordinary training at 1."""
    workloads = result["workloads"]
    measures = {"wall_ratio": "time of a step", "memory_ratio": "memory above the idle process"}
    measures = {key: label for key, label in measures.items() if all(key in w["summary"][REFERENCES[0]] for w in workloads.values())}
    size = (5 * len(measures) + 1, 2.9 * len(workloads))
    figure, axes = plt.subplots(len(workloads), len(measures), figsize=size, squeeze=False, sharey="row", layout="constrained")
    for row, measured in zip(axes, workloads.values(), strict=True):
        shown = {name: values for name, values in measured["summary"].items() if name != REFERENCES[1]}
        for place, (key, label) in zip(row, measures.items(), strict=True):
            _bars(place, shown, key, label)
        row[0].set_title(textwrap.fill(measured["title"], 45 * len(measures)), loc="left", fontsize=9)
    _save(figure, out)


def _bars(axes: Axes, rows: dict[str, dict[str, Any]], key: str, label: str) -> None:
    names = [name for name in rows if key in rows[name]]
    bars = axes.barh(
        [rows[name]["title"] for name in names],
        [rows[name][key] for name in names],
        color=[OURS if rows[name]["title"].startswith("lowkey") else OTHERS for name in names],
    )
    axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.margins(x=0.12)
    axes.set_xlabel(f"{label}, ordinary training = 1", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.yaxis.set_inverted(True)
    axes.spines[["top", "right"]].set_visible(False)


def draw_size(result: dict[str, Any], out: Path) -> None:
    """Draw what a private step held beside what AdamW would need."""
    figure, axes = plt.subplots(figsize=(6.5, 3.4), layout="constrained")
    labels = [f"{batch['examples']} × {result['shape']['tokens']}" for batch in result["batches"]]
    places = range(len(labels))
    private = [max(batch["peak"], batch["first_peak"]) / 1e9 for batch in result["batches"]]
    ordinary = [batch["adamw"] / 1e9 for batch in result["batches"]]
    for offset, values, color, label in [(-0.2, private, OURS, "private step, measured"), (0.2, ordinary, OTHERS, "AdamW, computed")]:
        axes.bar_label(axes.bar([place + offset for place in places], values, 0.4, color=color, label=label), fmt="%.1f", fontsize=8)
    axes.set_xticks(list(places), labels)
    axes.set_xlabel("batch, examples × tokens")
    axes.set_ylabel("memory of the process, GB")
    axes.set_title(f"{result['parameters'] / 1e9:.1f} billion parameters, float32, rank {result['rank']}", fontsize=10)
    figure.legend(frameon=False, loc="outside lower center", ncols=2, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    _save(figure, out)


def _save(figure: Any, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    # Without a date and with a fixed salt, the same numbers draw the same file.
    with mpl.rc_context({"svg.hashsalt": "lowkey"}):
        figure.savefig(out, metadata={"Date": None})
    plt.close(figure)
