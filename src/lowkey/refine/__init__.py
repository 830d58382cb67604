"""Functions of releases: what improves a release before the optimizer follows it."""

from lowkey.refine.average import MovingAverage
from lowkey.refine.denoising import Denoising
from lowkey.refine.power import PowerSteps
from lowkey.refine.project import project, project_randomly
from lowkey.refine.shrink import shrink, shrink_all
from lowkey.refine.spiked import bulk_edge, observed_values, shrunk_values, signal_values

__all__ = [
    "Denoising",
    "MovingAverage",
    "PowerSteps",
    "bulk_edge",
    "observed_values",
    "project",
    "project_randomly",
    "shrink",
    "shrink_all",
    "shrunk_values",
    "signal_values",
]
