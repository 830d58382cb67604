"""DP-SGD: the full gradient, clipped and noised. With Adam it is DP-Adam, with AdamW DP-AdamW."""

from __future__ import annotations

from dataclasses import dataclass

from lowkey.methods.method import FullGradient, Start, Strategy


@dataclass(frozen=True, kw_only=True)
class DPSGD:
    """Release the whole gradient; the optimizer steps the weights.

    Guarantee:
        Each step is one Gaussian release of the clipped sum of full per-example gradients.

    References:
        [grape2025], Alg. 3 with Adam; the noise goes on the sum.

    Example:
        >>> DPSGD()
        DPSGD()
    """

    @property
    def has_guarantee(self) -> bool:
        return True

    def start(self, start: Start) -> Strategy:
        """Become a strategy for one model."""
        return Strategy(sketching=FullGradient(start.specs))
