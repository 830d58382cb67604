"""Train neural networks on private records, in the small space where their gradients live.

A training loop of one's own takes `calibrate`, `privatize`, `Private.backward` and `Private.step`.
"""

from lowkey import audit, nonprivate
from lowkey.account import Plan, Poisson, Statement, TruncatedPoisson, Unsampled, epsilon
from lowkey.account.calibrate import calibrate
from lowkey.boundary import Provenance, Public, Released
from lowkey.errors import BudgetError, ConfigError, LedgerError, LowkeyError, PrivacyBoundaryError, ShapeError, UnsupportedLayerError
from lowkey.execution import CheckIsolation, Execution
from lowkey.methods import DPSGD, GEP, PDPSGD, RGP, RPDPSGD, Denoise, DPZero, Grape, LinearProbe, LoRA, NaiveGaLore, PowerSGD, Side
from lowkey.optim import OnRefresh
from lowkey.privatize import Private, StepReport, privatize
from lowkey.release import SecureNoise, SeededNoise, SystemNoise
from lowkey.sample import check_loader, poisson_batches, split, unsampled_batches
from lowkey.sketch import Distribution

__version__ = "0.1.0"

__all__ = [
    "DPSGD",
    "DPZero",
    "BudgetError",
    "CheckIsolation",
    "ConfigError",
    "Denoise",
    "Distribution",
    "Execution",
    "GEP",
    "Grape",
    "LedgerError",
    "LoRA",
    "LinearProbe",
    "LowkeyError",
    "NaiveGaLore",
    "OnRefresh",
    "PDPSGD",
    "Plan",
    "Poisson",
    "Private",
    "PowerSGD",
    "PrivacyBoundaryError",
    "Provenance",
    "Public",
    "RGP",
    "RPDPSGD",
    "Released",
    "SecureNoise",
    "SeededNoise",
    "ShapeError",
    "Side",
    "Statement",
    "StepReport",
    "SystemNoise",
    "TruncatedPoisson",
    "Unsampled",
    "UnsupportedLayerError",
    "__version__",
    "audit",
    "calibrate",
    "check_loader",
    "epsilon",
    "nonprivate",
    "poisson_batches",
    "privatize",
    "split",
    "unsampled_batches",
]
