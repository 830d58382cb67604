"""Functions of releases: what improves a release before the optimizer follows it."""

from lowkey.refine.power import PowerSteps

__all__ = ["PowerSteps"]
