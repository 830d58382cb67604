"""The privacy budget that a history of releases has spent."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from lowkey.account.events import Counts, Event, from_history, merge, without_caps
from lowkey.account.losses import epsilon_from_losses
from lowkey.account.renyi import compose_renyi, epsilon_from_renyi
from lowkey.checks import require_delta


class Accountant(Enum):
    """Which analysis proved the smaller epsilon."""

    RDP = "RDP"
    PLD = "PLD"


@dataclass(frozen=True, kw_only=True)
class Bound:
    """An upper bound on what was spent.

    Fields:
        epsilon: The bound; infinity where there is no guarantee.
        delta: The failure probability it holds at.
        accountant: Which analysis proved it.
    """

    epsilon: float
    delta: float
    accountant: Accountant


def epsilon(history: Iterable[tuple[float, float, int]], delta: float) -> float:
    """Compose releases under Poisson sampling and return their epsilon.

    Args:
        history: Entries ``(sampling_rate, noise_multiplier, num_steps)``, in any order.
        delta: The failure probability.

    Returns:
        The smaller of two upper bounds (Renyi, privacy loss distribution); 0 without releases, infinity when one had no noise.

    Raises:
        ConfigError: If an entry or ``delta`` cannot mean what it says.

    Guarantee:
        The composition is ``(epsilon, delta)``-DP for adding or removing one example (its contribution replaced by zero,
        the data set's size public), in exact arithmetic and with ideal Gaussian noise.

    Example:
        >>> round(epsilon([(1.0, 1.0, 1)], delta=1e-5), 3)
        4.377
    """
    return compose(from_history(history), delta).epsilon


def compose(events: Iterable[Event], delta: float) -> Bound:
    """Compose releases of any mixture of samplers and return the smallest proven bound.

    Args:
        events: What was released, in any order.
        delta: The failure probability.

    Raises:
        ConfigError: If ``delta`` is not in (0, 1).

    Guarantee:
        As for `epsilon`. Below ``delta`` of 1e-13, and where ``num_steps`` rounding errors could rival ``delta``, only Renyi is used.

    Cost:
        Once per distinct release, not per step; typically under 0.3 s the first time and nothing when asked again.
    """
    return _compose(merge(events), require_delta(delta), True)


def compose_roughly(events: Iterable[Event], delta: float) -> Bound:
    """Compose on the first grid only: as safe as `compose`, up to about 0.1 % larger, and three times as fast."""
    return _compose(merge(events), require_delta(delta), False)


def renyi_epsilon(events: Iterable[Event], delta: float) -> float:
    """Return the bound of the Renyi accountant alone.

    Guarantee:
        An upper bound as for `epsilon`, usually 5 to 15 % larger.
    """
    counts = merge(events)
    if any(mechanism.noise_multiplier == 0.0 for mechanism, _ in counts):
        return math.inf
    return epsilon_from_renyi(compose_renyi(counts), require_delta(delta)) if counts else 0.0


@lru_cache(maxsize=1024)
def _compose(counts: Counts, delta: float, settle: bool) -> Bound:
    if not counts:
        return Bound(epsilon=0.0, delta=delta, accountant=Accountant.RDP)
    if any(mechanism.noise_multiplier == 0.0 for mechanism, _ in counts):
        return Bound(epsilon=math.inf, delta=delta, accountant=Accountant.RDP)
    by_renyi = epsilon_from_renyi(compose_renyi(counts), delta)
    if by_renyi == 0.0:
        return Bound(epsilon=0.0, delta=delta, accountant=Accountant.RDP)
    scale = epsilon_from_renyi(compose_renyi(without_caps(counts)), delta)
    by_losses = epsilon_from_losses(counts, delta, scale, settle=settle)
    # PRIVACY: both are upper bounds, so the smaller one stands.
    if by_losses < by_renyi:
        return Bound(epsilon=by_losses, delta=delta, accountant=Accountant.PLD)
    return Bound(epsilon=by_renyi, delta=delta, accountant=Accountant.RDP)
