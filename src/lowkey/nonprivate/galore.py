"""GaLore: ordinary training in the leading singular directions of the batch's own gradient."""

from __future__ import annotations

from dataclasses import dataclass

from lowkey.methods import NaiveGaLore
from lowkey.methods.method import Start, Strategy


@dataclass(frozen=True, kw_only=True)
class GaLore:
    """Project the exact mean gradient on its own singular vectors, and keep the optimizer's state there.

    Its basis is a function of the private batch, so no noise makes it private: see `lowkey.Grape`, and `lowkey.NaiveGaLore`.

    Fields:
        rank: Kept dimensions per matrix.
        refresh_every: Steps between two bases; the paper uses 200.

    Guarantee:
        None.

    References:
        [zhao2024galore], Alg. 2. Its factor alpha is part of the learning rate here.

    Example:
        >>> GaLore(rank=4).has_guarantee
        False
    """

    rank: int
    refresh_every: int = 200

    def __post_init__(self) -> None:
        self._inner()

    def _inner(self) -> NaiveGaLore:
        return NaiveGaLore(rank=self.rank, refresh_every=self.refresh_every)

    @property
    def has_guarantee(self) -> bool:
        return False

    def start(self, start: Start) -> Strategy:
        """Become a strategy for one model: without noise, a release is the exact mean gradient."""
        return self._inner().start(start)
