"""The least noise that keeps a run within its budget."""

from __future__ import annotations

import math
from collections.abc import Callable

from lowkey.account.epsilon import compose_roughly
from lowkey.account.events import merge, without_caps
from lowkey.account.plan import Plan, check_facts
from lowkey.account.renyi import compose_renyi, epsilon_from_renyi
from lowkey.account.sampling import Poisson, Sampling
from lowkey.checks import require_number
from lowkey.errors import ConfigError

_DIGITS = 6
_SMALLEST_NOISE, _LARGEST_NOISE = 1e-3, 1e7
_CLOSE_ENOUGH = 5e-5
_MOST_TRIES = 40


def calibrate(
    *, epsilon: float, delta: float, num_examples: int, expected_batch_size: int, num_steps: int, sampling: Sampling | None = None
) -> Plan:
    """Find the smallest noise multiplier that meets a budget, and return its plan.

    Args:
        epsilon: The budget.
        delta: The failure probability; at most ``1 / num_examples``.
        num_examples: Size of the data set, which is public.
        expected_batch_size: Mean of the batch size.
        num_steps: How many releases the run makes.
        sampling: Who takes part in a step; Poisson sampling when omitted.

    Returns:
        A plan whose ``epsilon`` is at most the budget.

    Raises:
        ConfigError: If the budget cannot mean what it says, or no noise meets it.

    Guarantee:
        The noise multiplier is rounded up to six digits, and its epsilon is computed anew and compared with the budget afterwards.

    Cost:
        Under 1.5 s in ordinary settings; a few seconds for a million steps.

    Example:
        >>> plan = calibrate(epsilon=2.0, delta=1e-5, num_examples=100, expected_batch_size=100, num_steps=1)
        >>> round(plan.noise_multiplier, 2), plan.epsilon <= 2.0
        (1.99, True)
    """
    sampling = Poisson() if sampling is None else sampling
    check_facts(delta=delta, num_examples=num_examples, expected_batch_size=expected_batch_size, num_steps=num_steps, sampling=sampling)
    _check_epsilon(epsilon)
    facts = Plan(
        noise_multiplier=1.0,
        delta=delta,
        num_examples=num_examples,
        expected_batch_size=expected_batch_size,
        num_steps=num_steps,
        sampling=sampling,
    )
    guess = _solve_renyi(facts, epsilon)
    noise = _solve(lambda noise: _log_epsilon(facts.with_noise(noise)), math.log(epsilon), guess)
    return _verify(facts, noise, epsilon)


def _check_epsilon(epsilon: float) -> None:
    if not 0.0 < require_number("epsilon", epsilon) < math.inf:
        raise ConfigError(
            f"epsilon={epsilon} is not a budget. It must be positive and finite. "
            "For a run without privacy use lowkey.nonprivate, or Plan(noise_multiplier=0, ...)."
        )


def _verify(facts: Plan, noise: float, epsilon: float) -> Plan:
    for _ in range(_MOST_TRIES):
        noise = _round_up(noise)
        plan = facts.with_noise(noise)
        # PRIVACY: rounding and solving are both inexact; only an epsilon computed from the final noise counts.
        if plan.epsilon <= epsilon:
            return plan
        noise *= 1.0 + 2e-5
    raise _unreachable(epsilon, facts)


def _log_epsilon(plan: Plan) -> float:
    """Return the logarithm of an upper bound on the plan's epsilon (the quick one; the final one is no larger)."""
    bound = compose_roughly([plan.event(plan.num_steps)], plan.delta).epsilon
    return math.log(bound) if bound > 0.0 else -math.inf


def _solve_renyi(facts: Plan, epsilon: float) -> float:
    """Return the noise at which the Renyi accountant alone meets the budget: near, and usually a little above, the answer."""
    low, high = math.log(_SMALLEST_NOISE), math.log(_LARGEST_NOISE)
    if _renyi_epsilon(facts, math.exp(high)) > epsilon:
        raise _unreachable(epsilon, facts)
    for _ in range(26):
        middle = 0.5 * (low + high)
        if _renyi_epsilon(facts, math.exp(middle)) > epsilon:
            low = middle
        else:
            high = middle
    return math.exp(high)


def _renyi_epsilon(facts: Plan, noise: float) -> float:
    counts = without_caps(merge([facts.with_noise(noise).event(facts.num_steps)]))
    return epsilon_from_renyi(compose_renyi(counts), facts.delta)


def _solve(log_epsilon: Callable[[float], float], log_target: float, guess: float) -> float:
    """Find the noise whose epsilon meets the target: a secant in log-log coordinates, kept inside a bracket.

    Returns:
        A noise whose epsilon is at most the target, within `_CLOSE_ENOUGH` of the best where epsilon is smooth.
    """
    low, high = math.log(_SMALLEST_NOISE), math.log(_LARGEST_NOISE)
    previous: tuple[float, float] | None = None
    x = math.log(guess)
    for _ in range(_MOST_TRIES):
        gap = log_epsilon(math.exp(x)) - log_target
        low, high = (x, high) if gap > 0.0 else (low, x)
        if -_CLOSE_ENOUGH <= gap <= 0.0 or high - low < _CLOSE_ENOUGH:
            break
        x, previous = _next(x, gap, previous, low, high), (x, gap)
    return math.exp(high)


def _next(x: float, gap: float, previous: tuple[float, float] | None, low: float, high: float) -> float:
    slope = -1.0
    if previous is not None and previous[0] != x and math.isfinite(previous[1]) and math.isfinite(gap):
        slope = (gap - previous[1]) / (x - previous[0])
    aim = x - (gap + 0.4 * _CLOSE_ENOUGH) / slope if slope < 0.0 and math.isfinite(gap) else math.nan
    return aim if low < aim < high else 0.5 * (low + high)


def _round_up(noise: float) -> float:
    """Round up to `_DIGITS` significant digits."""
    unit = 10.0 ** (math.floor(math.log10(noise)) - _DIGITS + 1)
    return float(f"{math.ceil(noise / unit * (1.0 - 1e-13)) * unit:.{_DIGITS - 1}e}")


def _unreachable(epsilon: float, facts: Plan) -> ConfigError:
    return ConfigError(
        f"epsilon={epsilon:g} cannot be met in {facts.num_steps} steps at delta={facts.delta:g}. "
        f"Even a noise multiplier of {_LARGEST_NOISE:g} spends more. Raise epsilon, or take fewer steps."
    )
