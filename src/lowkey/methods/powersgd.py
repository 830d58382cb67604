"""PowerSGD: release the whole gradient, then keep a low-rank approximation of it. A baseline that RGP is to beat."""

from __future__ import annotations

from dataclasses import dataclass

from lowkey.checks import require_count
from lowkey.factors import wide_dtype
from lowkey.methods.matrices import wide_matrices
from lowkey.methods.method import FullGradient, Start, Strategy
from lowkey.refine.power import PowerSteps
from lowkey.sketch.power_method import draw_carriers


@dataclass(frozen=True, kw_only=True)
class PowerSGD:
    """Approximate each released matrix by one power iteration, and add the error to the next release.

    Fields:
        rank: Rank of the approximation.

    Guarantee:
        That of `DPSGD`: one Gaussian release of the full gradients, and post-processing of it.

    References:
        [yu2021rgp], section 5, and [vogels2019powersgd].

    Example:
        >>> PowerSGD(rank=4)
        PowerSGD(rank=4)
    """

    rank: int

    def __post_init__(self) -> None:
        require_count("rank", self.rank)

    @property
    def has_guarantee(self) -> bool:
        return True

    def start(self, start: Start) -> Strategy:
        """Become a strategy for one model."""
        starts = {}
        for name in wide_matrices(start.specs, self.rank):
            _, right = draw_carriers(*start.specs[name].matrix_shape, self.rank, (start.seed, "power", name))
            weight = start.weights[name]
            starts[name] = right.T.to(weight.device, wide_dtype(weight.dtype))
        return Strategy(sketching=FullGradient(start.specs), refining=PowerSteps(starts))
