"""What an audit found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Check(Enum):
    """What an audit looks at; a finding names one of these."""

    GUARANTEE = "a guarantee is claimed"
    NOISE_SCALE = "noise has the charged standard deviation"
    NOISE_SHAPE = "noise is Gaussian"
    NOISE_INDEPENDENCE = "noise never repeats and follows nothing"
    COVERAGE = "every trained coordinate is noised"
    SENSITIVITY = "one example moves the release by at most the clip norm"
    NOT_FINITE = "an example that is not finite counts for nothing"
    INVARIANCE = "cutting and ordering a batch changes nothing"
    ISOLATION = "an example counts the same alone and in company"
    CARRY_OVER = "a step leaves nothing for the next but its release"
    EMPTY_BATCH = "an empty batch makes a release like any other"
    LEDGER = "each release is charged once, at its price, before it is made"
    POST_PROCESSING = "weights follow from releases alone"
    SIDE_EFFECTS = "nothing else changes or keeps a gradient"
    SAMPLER_RATE = "examples join at the planned rate"
    SAMPLER_SIZE = "batch sizes vary as planned"
    SAMPLER_PAIRS = "examples join independently of each other"
    SAMPLER_REPEATS = "steps are drawn afresh"
    SAMPLER_DUPLICATES = "an example joins a step at most once"
    SAMPLER_LENGTH = "there are as many batches as planned"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One way in which what was seen contradicts what is claimed.

    Fields:
        check: What was violated.
        message: What was seen, and what should have been.
    """

    check: Check
    message: str

    def __str__(self) -> str:
        return f"[{self.check.name.lower()}] {self.message}"


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """The outcome of an audit; `str()` writes it out.

    Fields:
        findings: Every violation; none when the audit passed.
        measured: What was measured, one line each.

    Assumes:
        An audit can show that a claim is wrong, never that it is right: passing means that nothing was found.
    """

    findings: tuple[Finding, ...]
    measured: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def __str__(self) -> str:
        head = "PASSED: nothing was found" if self.passed else f"FAILED: {len(self.findings)} finding{'s' * (len(self.findings) > 1)}"
        return "\n".join([head, *(f"  {finding}" for finding in self.findings), *(f"  {line}" for line in self.measured)])


class Findings:
    """Collects findings and measurements while an audit runs."""

    def __init__(self) -> None:
        self._findings: list[Finding] = []
        self._measured: list[str] = []

    def report(self, check: Check, message: str) -> None:
        """Add a violation; of equal messages one is kept."""
        finding = Finding(check=check, message=message)
        if finding not in self._findings:
            self._findings.append(finding)

    def measure(self, line: str) -> None:
        """Add a line on what was measured."""
        self._measured.append(line)

    def result(self) -> AuditResult:
        """Return what was collected."""
        return AuditResult(findings=tuple(self._findings), measured=tuple(self._measured))
