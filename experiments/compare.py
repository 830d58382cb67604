"""Compare all methods on real data, at the same ε and with the same budget for tuning.

    python experiments/compare.py                                  # both tasks, every method; goes on where it stopped
    python experiments/compare.py --tasks image --entrants DPSGD Grape
    python experiments/compare.py --seeds 5 --workers 4
    python experiments/fill_pages.py                               # then bring the pages and figures up to date

Each method is tuned on one seed at ε = 8 on validation examples, then run on fresh seeds at every ε, and measured on test examples.
A finished run is appended to experiments/results/<task>.jsonl, so the script can be stopped at any time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from statistics import mean

from entrants import ENTRANTS
from standings import Results, chosen_setting, read_results
from tasks import TASKS, Task, load_task
from trial import PLANNED_EPSILON, Outcome, Phase, Trial, prepare_worker, protocol, run, to_line

import lowkey as lk
from lowkey.account import compose_trials

RESULTS = Path(__file__).resolve().parent / "results"
EPSILONS = (2.0, 8.0)
TUNING_SEED = 1000


class Comparison:
    """What is to be run, and what has been.

    Life cycle: `next_trials` and `add` in turns, until there is no next one.
    """

    def __init__(self, tasks: Sequence[Task], names: Sequence[str], num_seeds: int, folder: Path) -> None:
        self._tasks, self._names, self._folder = tasks, names, folder
        self._seeds = range(1, num_seeds + 1)
        self._settings = {(task.name, name): [str(s) for s in ENTRANTS[name].settings(task)] for task in tasks for name in names}
        self.results: dict[str, Results] = {task.name: read_results(folder, task.name, protocol(task)) for task in tasks}
        self.failed: dict[Trial, str] = {}

    def next_trials(self) -> list[Trial]:
        """Return what can be run now: first all tuning, then seed by seed every method that has been tuned."""
        tuning = [trial for task in self._tasks for name in self._names for trial in self._tuning(task.name, name)]
        final = [t for seed in self._seeds for task in self._tasks for name in self._names for t in self._final(task.name, name, seed)]
        return [trial for trial in (*tuning, *final) if trial not in self.results[trial.task] and trial not in self.failed]

    def _tuning(self, task: str, name: str) -> Iterator[Trial]:
        epsilon = PLANNED_EPSILON if ENTRANTS[name].has_guarantee else float("inf")
        for setting in self._settings[task, name]:
            yield Trial(task=task, phase=Phase.TUNING, entrant=name, setting=setting, epsilon=epsilon, seed=TUNING_SEED)

    def _final(self, task: str, name: str, seed: int) -> Iterator[Trial]:
        setting = chosen_setting(self.results[task], name)
        if any(trial not in self.results[task] for trial in self._tuning(task, name)) or setting is None:
            return
        for epsilon in EPSILONS if ENTRANTS[name].has_guarantee else (float("inf"),):
            yield Trial(task=task, phase=Phase.FINAL, entrant=name, setting=setting, epsilon=epsilon, seed=seed)

    def add(self, trial: Trial, outcome: Outcome) -> None:
        """Keep a finished run, on disk first."""
        with (self._folder / f"{trial.task}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(to_line(trial, outcome)) + "\n")
        self.results[trial.task][trial] = outcome

    @property
    def num_missing(self) -> int:
        """How many runs are left, the ones that cannot start yet included."""
        return sum(self._wanted(name) for _ in self._tasks for name in self._names) - self._num_done() - len(self.failed)

    def seconds_left(self) -> float:
        """Estimate the processor time of what is left from what similar runs took."""
        known = [outcome.seconds for results in self.results.values() for outcome in results.values()]
        left = 0.0
        for task in self._tasks:
            for name in self._names:
                mine = [outcome.seconds for trial, outcome in self.results[task.name].items() if trial.entrant == name]
                left += max(0, self._wanted(name) - self._num_done(task.name, name)) * mean(mine or known or [0.0])
        return left

    def _wanted(self, name: str) -> int:
        return 4 + len(self._seeds) * (len(EPSILONS) if ENTRANTS[name].has_guarantee else 1)

    def _num_done(self, task: str | None = None, name: str | None = None) -> int:
        return sum(
            (task or t.task) == t.task and (name or t.entrant) == t.entrant and t.entrant in self._names and self._counts(t)
            for results in self.results.values()
            for t in results
        )

    def _counts(self, trial: Trial) -> bool:
        return trial.phase is Phase.TUNING or trial.seed in self._seeds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for and has not been run."""
    options = _parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    missing = [name for name in options.entrants if not ENTRANTS[name].is_there]
    for name in missing:
        print(f"{name} is left out: this version of lowkey has no lowkey.{ENTRANTS[name].needs}")
    # Data are fetched here, once, before workers need them.
    tasks = [load_task(name) for name in options.tasks]
    for task in tasks:
        write_facts(task, options.out)
    comparison = Comparison(tasks, [name for name in options.entrants if name not in missing], options.seeds, options.out)
    _run_all(comparison, options.workers)
    for trial, reason in comparison.failed.items():
        print(f"failed: {trial.task}, {trial.entrant}, {trial.setting}, seed {trial.seed}: {reason}")
    return 1 if comparison.failed else 0


def _run_all(comparison: Comparison, num_workers: int) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=context, initializer=prepare_worker) as pool:
        running: dict[Future[Outcome], Trial] = {}
        while True:
            # No more are handed out than can start at once, so that a stopped script loses no more than that.
            for trial in [trial for trial in comparison.next_trials() if trial not in running.values()][: num_workers - len(running)]:
                running[pool.submit(run, trial)] = trial
            if not running:
                return
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                _keep(comparison, running.pop(future), future, num_workers)


def _keep(comparison: Comparison, trial: Trial, future: Future[Outcome], num_workers: int) -> None:
    error = future.exception()
    if error is not None:
        # One method that fails is no reason to lose a night; it is named at the end, and tried again next time.
        comparison.failed[trial] = f"{type(error).__name__}: {error}"
        outcome = "FAILED"
    else:
        comparison.add(trial, future.result())
        outcome = f"{future.result().accuracy:.3f} in {future.result().seconds:.0f} s"
    end = time.strftime("%H:%M", time.localtime(time.time() + comparison.seconds_left() / num_workers))
    epsilon = f"ε = {trial.epsilon:g}"
    label = f"{trial.task}  {trial.phase.value:6}  {trial.entrant}  {trial.setting}  {epsilon}  seed {trial.seed}"
    print(f"{label}: {outcome}; {comparison.num_missing} left, until about {end}", flush=True)


def write_facts(task: Task, folder: Path) -> None:
    """Write what is known of a task without a comparison, unless it is there."""
    path = folder / f"{task.name}-facts.json"
    if not path.exists():
        price = {f"{epsilon:g}": round(search_price(task.plan(epsilon)), 2) for epsilon in EPSILONS}
        facts = {"title": task.title, "num_test": len(task.test), "accuracy": dict(task.baselines()), "search_price": price}
        path.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def search_price(plan: lk.Plan) -> float:
    """Return the ε of a search that tries four settings on average, each on private examples, and keeps the best."""
    return compose_trials([plan.event(plan.num_steps)], plan.delta, mean_trials=4.0).epsilon


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["text", "image"])
    parser.add_argument("--entrants", nargs="+", choices=ENTRANTS, default=list(ENTRANTS), metavar="NAME", help=", ".join(ENTRANTS))
    parser.add_argument("--seeds", type=int, default=3, help="runs of each method at each ε; 0 to tune only")
    parser.add_argument("--workers", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
