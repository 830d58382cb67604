"""From finished runs to what the pages say of them: the chosen setting, means, spreads, and who differs from DP-SGD."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from entrants import ENTRANTS, REFERENCE, Entrant
from scipy.stats import ttest_ind
from trial import Outcome, Phase, Trial, from_line

Results = dict[Trial, Outcome]
ALPHA = 0.05
"""Two methods are said to differ where Welch's test, two-sided and not corrected for the number of methods, is below this."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What the runs of one method at one ε gave.

    Fields:
        accuracies: On the test examples, one for each seed.
        versus: 1 or -1 if the method differs from the reference at the same ε, in that direction; else 0.
    """

    accuracies: tuple[float, ...]
    versus: int

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return mean(self.accuracies)

    @property
    def spread(self) -> float:
        """Standard deviation over the seeds."""
        return stdev(self.accuracies) if len(self.accuracies) > 1 else math.nan


@dataclass(frozen=True, kw_only=True)
class Row:
    """A method in a table.

    Fields:
        entrant: The method.
        setting: What it chose.
        at: Its standing at each ε; a method without a guarantee has one, at infinity.
        released: Numbers released in a step.
        seconds: Median processor time of a run.
    """

    entrant: Entrant
    setting: str
    at: Mapping[float, Standing]
    released: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Standings:
    """A task's rows and what stands beside them.

    Fields:
        title: The task.
        protocol: What all methods had in common.
        num_test: How many examples were measured on.
        rows: The methods that have been run to the end, best first at the largest ε; those without a guarantee come last.
        baselines: Accuracies that need no comparison.
        search_price: The ε of a run at each ε, had its setting been chosen on private examples.
        unfinished: Methods that have not all their runs.
        noise: The noise multiplier at each ε.
    """

    title: str
    protocol: str
    num_test: int
    rows: tuple[Row, ...]
    baselines: Mapping[str, float]
    search_price: Mapping[float, float]
    unfinished: tuple[str, ...]
    noise: Mapping[float, float]

    @property
    def epsilons(self) -> tuple[float, ...]:
        """The budgets that were compared."""
        return tuple(sorted(self.noise))

    @property
    def num_seeds(self) -> int:
        """The fewest runs behind a number."""
        return min((len(standing.accuracies) for row in self.rows for standing in row.at.values()), default=0)


def read_results(folder: Path, task: str, protocol: str | None) -> Results:
    """Read a task's finished runs; those under another protocol than the given one are left out."""
    path = folder / f"{task}.jsonl"
    if not path.exists():
        return {}
    read = [from_line(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    return {trial: outcome for trial, outcome in read if protocol in (None, outcome.protocol)}


def chosen_setting(results: Results, entrant: str) -> str | None:
    """Return the setting with the best accuracy on the validation examples; the first of several, which has the smallest rate."""
    tuned = {
        trial.setting: outcome.accuracy for trial, outcome in results.items() if trial.phase is Phase.TUNING and trial.entrant == entrant
    }
    in_order = sorted(tuned, key=_rate)
    return max(in_order, key=tuned.__getitem__, default=None)


def _rate(setting: str) -> tuple[str, float]:
    optimizer, _, rate = setting.rpartition(", ")
    return optimizer, float(rate)


def standings(folder: Path, task: str) -> Standings:
    """Return what is known of a task, from the newest protocol among its results."""
    everything = read_results(folder, task, None)
    newest = list(everything.values())[-1].protocol
    results = {trial: outcome for trial, outcome in everything.items() if outcome.protocol == newest}
    facts: dict[str, Any] = json.loads((folder / f"{task}-facts.json").read_text(encoding="utf-8"))
    final = {trial: outcome for trial, outcome in results.items() if trial.phase is Phase.FINAL}
    noise = {trial.epsilon: outcome.noise_multiplier for trial, outcome in final.items() if math.isfinite(trial.epsilon)}
    rows = [row for name in ENTRANTS if (row := _row(results, final, name, noise)) is not None]
    return Standings(
        title=facts["title"],
        protocol=newest,
        num_test=facts["num_test"],
        rows=tuple(sorted(rows, key=lambda row: (not row.entrant.has_guarantee, -row.at[max(row.at)].mean))),
        baselines=facts["accuracy"],
        search_price={float(epsilon): price for epsilon, price in facts["search_price"].items()},
        unfinished=tuple(name for name in ENTRANTS if name not in {row.entrant.name for row in rows}),
        noise=noise,
    )


def _row(results: Results, final: Results, name: str, noise: Mapping[float, float]) -> Row | None:
    entrant, setting = ENTRANTS[name], chosen_setting(results, name)
    mine = {trial: outcome for trial, outcome in final.items() if trial.entrant == name and trial.setting == setting}
    wanted = set(noise) if entrant.has_guarantee else {math.inf}
    if setting is None or {trial.epsilon for trial in mine} != wanted:
        return None
    return Row(
        entrant=entrant,
        setting=setting,
        at={epsilon: _standing(results, final, name, epsilon) for epsilon in sorted(wanted)},
        released=next(iter(mine.values())).released,
        seconds=median(outcome.seconds for outcome in mine.values()),
    )


def _standing(results: Results, final: Results, name: str, epsilon: float) -> Standing:
    mine, theirs = (_accuracies(results, final, each, epsilon) for each in (name, REFERENCE))
    return Standing(accuracies=mine, versus=0 if name == REFERENCE else _compare(mine, theirs))


def _accuracies(results: Results, final: Results, name: str, epsilon: float) -> tuple[float, ...]:
    setting = chosen_setting(results, name)
    mine = {
        trial.seed: outcome.accuracy
        for trial, outcome in final.items()
        if (trial.entrant, trial.epsilon, trial.setting) == (name, epsilon, setting)
    }
    return tuple(mine[seed] for seed in sorted(mine))


def _compare(mine: tuple[float, ...], theirs: tuple[float, ...]) -> int:
    if min(len(mine), len(theirs)) < 2:
        return 0
    difference = mean(mine) - mean(theirs)
    if stdev(mine) == stdev(theirs) == 0.0:
        return (difference > 0) - (difference < 0)
    if not ttest_ind(mine, theirs, equal_var=False).pvalue < ALPHA:
        return 0
    return 1 if difference > 0 else -1
