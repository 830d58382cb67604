"""Bring docs/choose.md, the pages of the methods and the figures up to date with experiments/results.

python experiments/fill_pages.py
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from entrants import REFERENCE
from figures import draw
from standings import Row, Standing, Standings, standings

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"
TASKS = ("text", "image")
_MARKER = re.compile(r"<!-- measured: ([\w-]+) -->\n.*?<!-- end of \1 -->", re.DOTALL)
_COMMAND = "python experiments/compare.py"


def main() -> int:
    """Fill in whatever results there are."""
    found = {task: standings(RESULTS, task) for task in TASKS if (RESULTS / f"{task}.jsonl").exists()}
    page = ROOT / "docs" / "choose.md"
    text = page.read_text(encoding="utf-8")
    for task, standing in found.items():
        text = fill(text, task, task_text(standing, task))
        draw(standing, ROOT / "docs" / "images" / f"compare-{task}.svg")
    page.write_text(text, encoding="utf-8")
    for path in sorted((ROOT / "docs" / "methods").glob("*.md")):
        before = path.read_text(encoding="utf-8")
        after = fill_method_page(before, path.stem, found)
        if after != before:
            path.write_text(after, encoding="utf-8")
    return 0


def fill(page: str, name: str, text: str) -> str:
    """Replace what stands between the two markers of `name`."""
    pattern = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end of {name} -->)", re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"the page has no markers <!-- {name} --> and <!-- end of {name} -->. Add them where the numbers belong.")
    return pattern.sub(lambda _: f"\n{text}\n\n", page, count=1)


def fill_method_page(page: str, stem: str, found: Mapping[str, Standings]) -> str:
    """Replace what stands between the markers of a method's page by its rows, beside those of DP-SGD and of training without privacy."""
    return _MARKER.sub(lambda match: f"<!-- measured: {match[1]} -->\n\n{method_text(stem, found)}\n\n<!-- end of {match[1]} -->", page)


def method_text(stem: str, found: Mapping[str, Standings]) -> str:
    """Return the tables of one method's page."""
    parts = [f"From `{_COMMAND}`; what was compared, and how, is in [](../choose.md)."]
    for standing in found.values():
        rows = [row for row in standing.rows if row.entrant.page == stem.replace("_", "") or row.entrant.name in (REFERENCE, "NonPrivate")]
        if any(row.entrant.page == stem.replace("_", "") for row in rows):
            parts += ["", f"{standing.title}:", "", table(standing, rows)]
    return "\n".join(parts)


def task_text(standing: Standings, task: str) -> str:
    """Return everything that docs/choose.md says of one task by itself."""
    noise = ", ".join(f"{value:.3f} at ε = {epsilon:g}" for epsilon, value in sorted(standing.noise.items()))
    names = ", ".join(f"{name} {value:.3f}" for name, value in standing.baselines.items())
    prices = " and of ".join(f"ε = {epsilon:g} an ε of {price:.2f}" for epsilon, price in sorted(standing.search_price.items()))
    parts = [
        f"![Accuracy of every method](images/compare-{task}.svg)",
        "",
        f"{standing.protocol[:1].upper()}{standing.protocol[1:]}.",
        f"The noise multiplier is {noise}.",
        f"Had the settings been chosen on private examples, the search would have made of {prices}.",
        f"To hold against it, on the same {standing.num_test:,} test examples: {names}.",
        "",
        table(standing, standing.rows),
        "",
        *_verdicts(standing),
    ]
    if standing.unfinished:
        parts += ["", f"Not run to the end: {', '.join(standing.unfinished)}."]
    return "\n".join(parts)


def table(standing: Standings, rows: Iterable[Row]) -> str:
    """Return rows as a Markdown table."""
    epsilons = standing.epsilons
    head = ["method", *(f"ε = {epsilon:g}" for epsilon in epsilons), "released in a step", "processor time", "setting"]
    lines = [head, ["---", *["---:"] * (len(head) - 2), "---"]]
    for row in rows:
        if row.entrant.has_guarantee:
            cells = [_cell(row.at[epsilon]) for epsilon in epsilons]
        else:
            # One number, whatever the budget would have been.
            cells = [*[""] * (len(epsilons) - 1), f"{_cell(row.at[math.inf])} (ε = ∞)"]
        lines.append([row.entrant.name, *cells, f"{row.released:,}", f"{row.seconds:.0f} s", row.setting])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _verdicts(standing: Standings) -> list[str]:
    """Say, one sentence for each ε, who differs from the reference."""
    return [sentence for epsilon in standing.epsilons for sentence in _verdict(standing, epsilon)]


def _verdict(standing: Standings, epsilon: float) -> list[str]:
    private = [row for row in standing.rows if row.entrant.has_guarantee]
    best = max(private, key=lambda row: row.at[epsilon].mean)
    groups = {sign: [row.entrant.name for row in private if row.at[epsilon].versus == sign] for sign in (1, -1)}
    undecided = [row.entrant.name for row in private if row.at[epsilon].versus == 0 and row.entrant.name != REFERENCE]
    return [
        f"At ε = {epsilon:g} the highest mean is {best.entrant.name}'s, {best.at[epsilon].mean:.3f}.",
        f"Better than {REFERENCE}: {_names(groups[1])}; worse: {_names(groups[-1])}; not told apart: {_names(undecided)}.",
    ]


def _names(names: list[str]) -> str:
    return ", ".join(names) or "none"


def _cell(standing: Standing) -> str:
    mark = {1: " ▲", -1: " ▼", 0: ""}[standing.versus]
    return f"{standing.mean:.3f} ± {standing.spread:.3f}{mark}"


if __name__ == "__main__":
    raise SystemExit(main())
