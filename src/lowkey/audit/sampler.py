"""Check that batches are drawn as a plan's accountant assumes: their sizes, how often each example joins, and who joins with whom."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from lowkey.account import Plan, TruncatedPoisson, Unsampled
from lowkey.audit.result import AuditResult, Check, Findings
from lowkey.audit.statistics import ALPHA, distributions
from lowkey.errors import ConfigError
from lowkey.sample import poisson_batches, unsampled_batches
from lowkey.sample.microbatch import map_columns

MakeBatches = Callable[[TensorDataset, Plan], Iterable[Any]]
Draw = NDArray[np.int64]

_NUM_TESTS = 8
_MOST_STEPS = 20_000
_FEWEST_STEPS = 60


def sampler(plan: Plan, make_batches: MakeBatches | None = None, *, num_draws: int = 150_000) -> AuditResult:
    """Check a sampler against the plan that its steps are charged to.

    Args:
        plan: Says how examples are drawn.
        make_batches: Called with a dataset and the plan, returns the batches of one run; lowkey's own sampler by default. The dataset holds
            the numbers of its examples, so that a batch shows who was drawn.
        num_draws: How many joined examples to look at. 150,000 tells a rate from one 3 % larger.

    Returns:
        What was found. `.passed` is True if nothing was.

    Raises:
        ConfigError: A batch does not show the numbers of its examples.

    Guarantee:
        A sampler that keeps its promise fails with probability below 1e-6, up to the normal approximation of sums of thousands of draws.
        Passing proves nothing: other ways to depend exist than those that are looked for.

    Example:
        >>> import lowkey as lk
        >>> plan = lk.Plan(noise_multiplier=1.0, delta=1e-5, num_examples=5000, expected_batch_size=100, num_steps=300)
        >>> lk.audit.sampler(plan).passed
        True
    """
    findings = Findings()
    # A copy, so that the draws of an audit count for no statement.
    plan = dataclasses.replace(plan)
    draws = _collect(plan, make_batches or _own, num_draws, findings)
    if not draws:
        findings.report(Check.SAMPLER_LENGTH, "there were no batches.")
        return findings.result()
    _check_distinct(draws, findings)
    if isinstance(plan.sampling, Unsampled):
        _check_epochs(draws, plan, findings)
    else:
        _check_poisson(draws, plan, findings)
    return findings.result()


def _own(dataset: TensorDataset, plan: Plan) -> Iterable[Any]:
    if isinstance(plan.sampling, Unsampled):
        return unsampled_batches(dataset, plan, seed=0)
    return poisson_batches(dataset, plan)


def _collect(plan: Plan, make_batches: MakeBatches, num_draws: int, findings: Findings) -> list[Draw]:
    """Draw runs, one after the other, until there are enough batches."""
    dataset = TensorDataset(torch.arange(plan.num_examples))
    wanted = min(_MOST_STEPS, max(_FEWEST_STEPS, -(-num_draws // plan.expected_batch_size)))
    if isinstance(plan.sampling, Unsampled):
        wanted = plan.num_steps
    draws: list[Draw] = []
    while len(draws) < wanted:
        before = len(draws)
        for batch in make_batches(dataset, plan):
            draws.append(_numbers(batch))
            if len(draws) == wanted:
                break
        else:
            if len(draws) - before != plan.num_steps:
                findings.report(Check.SAMPLER_LENGTH, f"a run had {len(draws) - before} batches, and its plan has {plan.num_steps} steps.")
            if len(draws) == before:
                break
    return draws


def _numbers(batch: object) -> Draw:
    found: list[torch.Tensor] = []
    map_columns(batch, lambda column: found.append(torch.as_tensor(column)))
    if not found or found[0].dim() != 1 or found[0].is_floating_point():
        raise ConfigError(
            f"a batch of type {type(batch).__name__} does not show who was drawn. "
            "The dataset that make_batches is given holds one number per example. "
            "Return its batches as they are, without a collate function of your own."
        )
    return found[0].numpy().astype(np.int64)


def _check_distinct(draws: list[Draw], findings: Findings) -> None:
    repeated = sum(len(draw) - len(np.unique(draw)) for draw in draws)
    if repeated:
        findings.report(
            Check.SAMPLER_DUPLICATES, f"{repeated} times an example joined the same batch twice. It then counts twice what one example may."
        )


# -- Poisson -----------------------------------------------------------------------------------------------------------


def _check_poisson(draws: list[Draw], plan: Plan, findings: Findings) -> None:
    num_steps, num_examples = len(draws), plan.num_examples
    sizes = np.array([len(draw) for draw in draws])
    law, rate = _law_of_sizes(plan)
    joined = int(sizes.sum())
    findings.measure(
        f"sampler: {joined} draws in {num_steps} batches, rate {joined / num_steps / num_examples:.5g} of a planned {rate:.5g}"
    )
    _check_rate(joined, num_steps, law, findings)
    _check_sizes(sizes, law, findings)
    _check_examples(draws, num_examples, rate, findings)
    _check_pairs(draws, num_examples, law, findings)
    _check_fresh(draws, num_examples, rate, plan.num_steps, findings)
    if isinstance(plan.sampling, TruncatedPoisson) and sizes.max() > plan.sampling.max_batch_size:
        findings.report(Check.SAMPLER_SIZE, f"a batch has {sizes.max()} examples, above the cap of {plan.sampling.max_batch_size}.")


@dataclasses.dataclass(frozen=True)
class _Law:
    """The law of a batch's size, by its support and probabilities."""

    sizes: NDArray[np.float64]
    chances: NDArray[np.float64]

    def moment(self, order: int) -> float:
        """Return a central moment."""
        return float(((self.sizes - self.mean) ** order) @ self.chances)

    @property
    def mean(self) -> float:
        return float(self.sizes @ self.chances)


def _law_of_sizes(plan: Plan) -> tuple[_Law, float]:
    """Return the law of a batch's size, and the chance that one example joins."""
    spread = 12.0 * math.sqrt(plan.expected_batch_size) + 12.0
    first = max(0, math.floor(plan.expected_batch_size - spread))
    last = min(plan.num_examples, math.ceil(plan.expected_batch_size + spread))
    sizes = np.arange(first, last + 1)
    chances = distributions().binom.pmf(sizes, plan.num_examples, plan.sampling_rate)
    cap = plan.sampling.max_batch_size if isinstance(plan.sampling, TruncatedPoisson) else plan.num_examples
    law = _Law(np.minimum(sizes, cap).astype(np.float64), chances / chances.sum())
    return law, law.mean / plan.num_examples


def _check_rate(joined: int, num_steps: int, law: _Law, findings: Findings) -> None:
    mean, variance = law.mean * num_steps, law.moment(2) * num_steps
    if _two_sided(joined, mean, variance) < ALPHA / _NUM_TESTS:
        findings.report(Check.SAMPLER_RATE, f"{joined} draws where {mean:.0f} were planned, {joined / mean:.4g} times as many.")


def _check_sizes(sizes: NDArray[np.int64], law: _Law, findings: Findings) -> None:
    squares = float(((sizes - law.mean) ** 2).sum())
    variance = law.moment(4) - law.moment(2) ** 2
    if _two_sided(squares, len(sizes) * law.moment(2), len(sizes) * variance) < ALPHA / _NUM_TESTS:
        ratio = math.sqrt(squares / len(sizes) / law.moment(2)) if law.moment(2) else math.inf
        findings.report(
            Check.SAMPLER_SIZE,
            f"batch sizes vary {ratio:.3g} times as much as planned. Independent coins for each example give another spread.",
        )


def _check_examples(draws: list[Draw], num_examples: int, rate: float, findings: Findings) -> None:
    counts = np.bincount(np.concatenate(draws), minlength=num_examples)
    spread = len(draws) * rate * (1.0 - rate)
    if spread == 0.0:
        return
    dispersion = float(((counts - len(draws) * rate) ** 2).sum()) / spread
    # A square of a binomial, in units of its variance, varies by two, and by its kurtosis.
    variance = num_examples * (2.0 + (1.0 - 6.0 * rate * (1.0 - rate)) / spread)
    if _two_sided(dispersion, num_examples, variance) < ALPHA / _NUM_TESTS:
        findings.report(
            Check.SAMPLER_RATE,
            f"how often examples joined varies {math.sqrt(dispersion / num_examples):.3g} times as much as equal rates would.",
        )


def _check_pairs(draws: list[Draw], num_examples: int, law: _Law, findings: Findings) -> None:
    """Count how often fixed pairs of examples join together: neighbours, and examples half a dataset apart."""
    half = num_examples // 2
    chance = float((law.sizes * (law.sizes - 1.0)) @ law.chances) / num_examples / max(1, num_examples - 1)
    for label, partner, first in (
        ("neighbours", lambda draw: draw ^ 1, half * 2),
        ("examples half a dataset apart", lambda draw: draw + half, half),
    ):
        together = sum(
            int(np.isin(partner(low), draw, assume_unique=False).sum()) for draw in draws for low in [_lower(draw, first, label)]
        )
        _report_pairs(together, half * len(draws), chance, f"{label} joined together", Check.SAMPLER_PAIRS, findings)


def _lower(draw: Draw, first: int, label: str) -> Draw:
    return draw[(draw < first) & (draw % 2 == 0)] if label == "neighbours" else draw[draw < first]


def _check_fresh(draws: list[Draw], num_examples: int, rate: float, run_length: int, findings: Findings) -> None:
    """Count how often an example joins two steps in a row, and the same step of two runs in a row."""
    for lag in sorted({1, 2, run_length}):
        # Pairs of steps that share none, so that their counts are independent.
        pairs = [(draws[i], draws[i + lag]) for i in range(len(draws) - lag) if i % (2 * lag) < lag]
        again = sum(len(np.intersect1d(a, b)) for a, b in pairs)
        label = f"an example joined again {lag} step{'s' * (lag > 1)} later"
        _report_pairs(again, num_examples * len(pairs), rate**2, label, Check.SAMPLER_REPEATS, findings)


def _report_pairs(count: int, trials: int, chance: float, label: str, check: Check, findings: Findings) -> None:
    if not trials:
        return
    p_value = min(1.0, 2.0 * min(distributions().binom.cdf(count, trials, chance), distributions().binom.sf(count - 1, trials, chance)))
    if p_value < ALPHA / _NUM_TESTS:
        findings.report(check, f"{label} {count} times, where {trials * chance:.1f} were expected.")


def _two_sided(value: float, mean: float, variance: float) -> float:
    """Return the p-value under a gamma law of this mean and variance: right for sums of squares, and near a normal for large means."""
    if variance <= 0.0:
        return 1.0 if math.isclose(value, mean) else 0.0
    law = distributions().gamma(mean * mean / variance, scale=variance / mean)
    return float(min(1.0, 2.0 * min(law.cdf(value), law.sf(value))))


# -- shuffled epochs ---------------------------------------------------------------------------------------------------


def _check_epochs(draws: list[Draw], plan: Plan, findings: Findings) -> None:
    """Look whether each epoch shows every example once, in batches of the planned size."""
    per_epoch = -(-plan.num_examples // plan.expected_batch_size)
    findings.measure(f"sampler: {len(draws)} shuffled batches, {len(draws) / per_epoch:.3g} epochs; no amplification is claimed")
    for number, epoch in enumerate(_in_epochs(draws, per_epoch)):
        shown = np.concatenate(epoch)
        if len(np.unique(shown)) < len(shown):
            findings.report(Check.SAMPLER_REPEATS, f"epoch {number + 1} shows an example twice. It may show each at most once.")
        if len(epoch) == per_epoch and len(np.unique(shown)) < plan.num_examples:
            missing = plan.num_examples - len(np.unique(shown))
            findings.report(
                Check.SAMPLER_RATE,
                f"epoch {number + 1} leaves out {missing} examples, so epochs are shorter and the others join more often.",
            )
    if any(len(draw) > plan.expected_batch_size for draw in draws):
        findings.report(Check.SAMPLER_SIZE, f"a batch has {max(map(len, draws))} examples, and the plan says {plan.expected_batch_size}.")


def _in_epochs(draws: list[Draw], per_epoch: int) -> Iterator[list[Draw]]:
    for start in range(0, len(draws), per_epoch):
        yield draws[start : start + per_epoch]
