"""What may be said about the privacy of a run, with everything that the number needs beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

from lowkey.account.epsilon import Accountant
from lowkey.account.sampling import Sampling

UNIT = "one example"
RELATION = "add or remove one example (its contribution replaced by zero); the number of examples is public"
NOT_COVERED = "training losses, un-noised gradient norms, clip fractions, and choices made by looking at the private examples"


class NoiseOrigin(Enum):
    """Where the noise of a run comes from."""

    SYSTEM = "system"
    SECURE = "secure"
    SEEDED = "seeded"


@dataclass(frozen=True, kw_only=True)
class Statement:
    """The facts behind an epsilon; ``str()`` writes them out.

    `Plan.statement` fills in what was planned; the training side replaces ``clip_norm``, ``method`` and ``noise_source``.

    Fields:
        epsilon: The bound; infinity where there is no guarantee. Seeded noise makes it infinite.
        delta: The failure probability.
        accountant: Which analysis proved the bound.
        sampling: Who took part in each release.
        num_steps: Releases made, or to be made.
        num_planned_steps: Releases that the plan allows.
        sampling_rate: Probability that an example joins a step.
        noise_multiplier: Noise standard deviation over ``clip_norm``.
        expected_batch_size: Mean of the batch size.
        num_examples: Public size of the data set.
        clip_norm: The L2 limit per example, when known.
        method: Name of the training method, when known.
        noise_source: Where the noise comes from, when known.
        unit: Whose participation is hidden.
        relation: What neighbouring data sets are.
        caveats: Further sentences that the reader must know.

    Guarantee:
        ``has_guarantee`` is true only for a finite epsilon, and the text says so in its first line either way.
    """

    epsilon: float
    delta: float
    accountant: Accountant
    sampling: Sampling
    num_steps: int
    num_planned_steps: int
    sampling_rate: float
    noise_multiplier: float
    expected_batch_size: int
    num_examples: int
    clip_norm: float | None = None
    method: str | None = None
    noise_source: NoiseOrigin | None = None
    unit: str = UNIT
    relation: str = RELATION
    caveats: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.noise_source is NoiseOrigin.SEEDED:
            # PRIVACY: whoever knows the seed subtracts the noise, so no finite epsilon holds.
            object.__setattr__(self, "epsilon", math.inf)

    @property
    def has_guarantee(self) -> bool:
        """Whether any privacy is promised."""
        return math.isfinite(self.epsilon)

    @property
    def headline(self) -> str:
        """The first line of the text, short enough to quote."""
        if not self.has_guarantee:
            return f"No privacy guarantee (ε = ∞): {self._reason()}."
        return (
            f"(ε = {format_up(self.epsilon)}, δ = {self.delta:.6g})-DP per example, adding or removing one; "
            f"{self.sampling}, {self.num_steps} steps, {self.accountant.value}"
        )

    def with_caveat(self, caveat: str) -> Statement:
        """Return the statement with one more sentence for its reader."""
        return replace(self, caveats=(*self.caveats, caveat))

    def without_guarantee(self, reason: str) -> Statement:
        """Return the statement of a run that ``reason`` deprives of its guarantee."""
        return replace(self, epsilon=math.inf, caveats=(reason, *self.caveats))

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self._lines())
        return "\n".join([self.headline, *(f"  {name:<{width}}  {text}" for name, text in self._lines())])

    def _reason(self) -> str:
        if self.noise_source is NoiseOrigin.SEEDED:
            return "the noise comes from a known seed, so anyone can subtract it"
        if self.noise_multiplier == 0.0 and self.num_steps:
            return "no noise was planned"
        return self.caveats[0].rstrip(".") if self.caveats else "no bound could be proved"

    def _lines(self) -> list[tuple[str, str]]:
        clip = "" if self.clip_norm is None else f", clip norm C = {self.clip_norm:g}"
        source = "" if self.noise_source is None else f", {self.noise_source.value} noise"
        lines = [
            ("method", self.method or ""),
            ("unit of privacy", self.unit),
            ("relation", self.relation),
            ("sampler", f"{self.sampling}, rate q = {self.sampling_rate:.6g}"),
            ("batch", f"{self.expected_batch_size} expected of {self.num_examples} examples"),
            ("releases", f"{self.num_steps} of {self.num_planned_steps} planned"),
            ("noise", f"multiplier σ = {self.noise_multiplier:.6g}{clip}{source}"),
        ]
        if self.has_guarantee:
            lines += [
                ("accountant", f"{self.accountant.value}, the smaller of the RDP and PLD bounds (dp-accounting)"),
                ("holds for", "real arithmetic and ideal Gaussian noise; no claim against floating-point or timing attacks"),
                ("not covered", NOT_COVERED),
            ]
        return [line for line in lines if line[1]] + [("caveat", caveat) for caveat in self.caveats]


def format_up(epsilon: float) -> str:
    """Write ``epsilon`` with two decimals, or three digits when small, rounded up so that the text never promises too much."""
    if math.isinf(epsilon):
        return "∞"
    if epsilon <= 0.0:
        return "0"
    decimals = max(2, 2 - math.floor(math.log10(epsilon)))
    scaled = epsilon * 10.0**decimals
    return f"{math.ceil(scaled * (1.0 - 1e-12)) / 10.0**decimals:.{decimals}f}"
