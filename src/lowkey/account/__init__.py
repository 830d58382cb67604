"""The number: what a run may release, what it has released, and what that costs. Nothing here imports torch."""

from __future__ import annotations

from lowkey.account.calibrate import calibrate
from lowkey.account.epsilon import Accountant, Bound, compose, epsilon, renyi_epsilon
from lowkey.account.events import Event
from lowkey.account.header import Head, RunHeader
from lowkey.account.ledger import History, Ledger, open_ledger
from lowkey.account.plan import Plan
from lowkey.account.published import PublishedEpsilon, gaussian_limit_epsilon, moments_epsilon_2017
from lowkey.account.runs import LedgerReport, Run, read_ledger
from lowkey.account.sampling import Poisson, Sampling, TruncatedPoisson, Unsampled
from lowkey.account.statement import NoiseOrigin, Statement
from lowkey.account.trials import TrialCount, compose_trials, draw_num_trials

__all__ = [
    "Accountant",
    "Bound",
    "Event",
    "Head",
    "History",
    "Ledger",
    "LedgerReport",
    "NoiseOrigin",
    "Plan",
    "Poisson",
    "PublishedEpsilon",
    "Run",
    "RunHeader",
    "Sampling",
    "Statement",
    "TrialCount",
    "TruncatedPoisson",
    "Unsampled",
    "calibrate",
    "compose",
    "compose_trials",
    "draw_num_trials",
    "epsilon",
    "gaussian_limit_epsilon",
    "moments_epsilon_2017",
    "open_ledger",
    "read_ledger",
    "renyi_epsilon",
]
