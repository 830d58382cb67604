"""The number: what a run may release, what it has released, and what that costs. Nothing here imports torch."""

from __future__ import annotations

from lowkey.account.epsilon import Accountant, Bound, compose, epsilon, renyi_epsilon
from lowkey.account.events import Event
from lowkey.account.plan import Plan
from lowkey.account.sampling import Poisson, Sampling, TruncatedPoisson, Unsampled
from lowkey.account.statement import NoiseOrigin, Statement

__all__ = [
    "Accountant",
    "Bound",
    "Event",
    "NoiseOrigin",
    "Plan",
    "Poisson",
    "Sampling",
    "Statement",
    "TruncatedPoisson",
    "Unsampled",
    "compose",
    "epsilon",
    "renyi_epsilon",
]
