"""The figures of docs/choose.md: every method's accuracy at each ε, with its spread, beside the baselines."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib as mpl
from entrants import REFERENCE
from standings import Row, Standings

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

COLORS = {2.0: "#dd6b20", 8.0: "#2b6cb0"}
WITHOUT, LINE, STRIPE = "#718096", "#a0aec0", "#f4f6f9"
_OFFSET = 0.17


def draw(standings: Standings, out: Path) -> None:
    """Draw a task's standings as an SVG, or in whatever format the name of `out` asks for."""
    rows = standings.rows
    figure, axes = plt.subplots(figsize=(8.0, 0.34 * len(rows) + 1.5), layout="constrained")
    for place, row in enumerate(rows):
        if place % 2:
            axes.axhspan(place - 0.5, place + 0.5, color=STRIPE, zorder=0, linewidth=0)
        _points(axes, place, row)
    _baselines(axes, standings)
    _frame(axes, standings)
    _legend(figure, standings)
    _save(figure, out)


def _points(axes: Axes, place: int, row: Row) -> None:
    epsilons = sorted(row.at)
    for index, epsilon in enumerate(epsilons):
        standing = row.at[epsilon]
        spread = 0.0 if math.isnan(standing.spread) else standing.spread
        height = place + _OFFSET * (2 * index - len(epsilons) + 1)
        color = COLORS.get(epsilon, WITHOUT)
        axes.errorbar(standing.mean, height, xerr=spread, fmt="none", ecolor=color, elinewidth=1.6, capsize=2.5, zorder=3)
        axes.plot(
            standing.mean, height, marker="o" if row.entrant.has_guarantee else "D", markersize=5.5, color=color,
            markerfacecolor=color if row.entrant.has_guarantee else "white", zorder=4,
        )  # fmt: skip


def _baselines(axes: Axes, standings: Standings) -> None:
    for value, style in zip(standings.baselines.values(), ("--", ":"), strict=False):
        axes.axvline(value, color=LINE, linestyle=style, linewidth=1.2, zorder=1)


def _frame(axes: Axes, standings: Standings) -> None:
    rows = standings.rows
    first_without = next((place for place, row in enumerate(rows) if not row.entrant.has_guarantee), len(rows))
    if 0 < first_without < len(rows):
        axes.axhline(first_without - 0.5, color=WITHOUT, linewidth=0.8)
    axes.set_yticks(range(len(rows)), [_label(row) for row in rows])
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_fontweight("bold" if row.entrant.name == REFERENCE else "normal")
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(
        f"accuracy on {standings.num_test:,} test examples, mean and standard deviation of {standings.num_seeds} runs", fontsize=9
    )
    axes.set_title(standings.title, fontsize=10, loc="left")
    axes.tick_params(labelsize=9, length=0)
    axes.grid(axis="x", color="#e2e8f0", linewidth=0.7, zorder=0)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _label(row: Row) -> str:
    return f"{row.entrant.name} ★" if row.entrant.uses_public else row.entrant.name


def _legend(figure: plt.Figure, standings: Standings) -> None:
    def point(color: str, label: str, *, is_private: bool = True) -> plt.Line2D:
        face, marker = (color, "o") if is_private else ("white", "D")
        return plt.Line2D([], [], color=color, markerfacecolor=face, marker=marker, linestyle="none", markersize=5.5, label=label)

    handles = [point(COLORS.get(epsilon, WITHOUT), f"ε = {epsilon:g}") for epsilon in standings.epsilons]
    handles.append(point(WITHOUT, "no guarantee", is_private=False))
    for (name, value), style in zip(standings.baselines.items(), ("--", ":"), strict=False):
        handles.append(plt.Line2D([], [], color=LINE, linestyle=style, label=f"{name}: {value:.3f}"))
    handles.append(plt.Line2D([], [], linestyle="none", label="★ uses public examples"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8.5)


def _save(figure: plt.Figure, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    # Without a date and with a fixed salt, the same numbers draw the same file.
    with mpl.rc_context({"svg.hashsalt": "lowkey"}):
        figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None, dpi=130)
    plt.close(figure)
