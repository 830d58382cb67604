"""A batch counts the same however it is cut and ordered, and an example the same in any company."""

from __future__ import annotations

from collections.abc import Sequence

from lowkey.audit.compare import distance, rounding
from lowkey.audit.result import Check, Findings
from lowkey.audit.subject import EMPTY, Coordinates, Part, Step, Subject
from lowkey.release import SeededNoise

_SEED = 12
_TOLERANCE = 1e-3
"""Relative: a batch of another shape rounds differently all the way through a model."""

_CLIPPED = 1e4


def check_invariance(subject: Subject, findings: Findings) -> None:
    """Compare whole batches with their parts, once with every example clipped and once with none."""
    scale, largest = _unclipped_scale(subject)
    findings.measure(f"invariance: compared with losses times {scale:.3g}, where no example is clipped, and times {_CLIPPED:g}")
    _check_cuts(subject, scale, largest * subject.num_examples, findings)
    _check_cuts(subject, _CLIPPED, subject.unit * subject.num_examples, findings)
    _check_company(subject, scale, largest, findings)


def _release(subject: Subject, parts: Step) -> Coordinates:
    return subject.run([parts], SeededNoise(_SEED)).release()


def _unclipped_scale(subject: Subject) -> tuple[float, float]:
    """Find a scale of the losses at which every example stays inside the clip norm, and how far the largest then moves the release."""
    empty = _release(subject, EMPTY)
    scale, largest = 1.0, 0.0
    for _ in range(12):
        moved = [distance(_release(subject, [Part(rows=(row,), scale=scale)]), empty) for row in subject.rows]
        largest = max(moved)
        if largest == 0.0 or 0.05 * subject.unit <= largest <= 0.9 * subject.unit:
            break
        scale *= 0.01 if largest > 0.9 * subject.unit else 0.5 * subject.unit / largest
    return scale, largest


def _check_cuts(subject: Subject, scale: float, size: float, findings: Findings) -> None:
    rows = subject.rows
    whole = _release(subject, [Part(rows=rows, scale=scale)])
    for label, cut in _cuts(rows).items():
        found = _release(subject, [Part(rows=part, scale=scale) for part in cut])
        apart = distance(found, whole)
        if apart > _TOLERANCE * size + rounding(found, whole):
            findings.report(
                Check.INVARIANCE,
                f"a batch {label} made another release than the whole: "
                f"{apart / subject.unit:.4g} clip norms apart, losses times {scale:.3g}. Something depends on which examples are "
                "computed together: noise or a mean for each part, or a loss divided by their number.",
            )


def _cuts(rows: tuple[int, ...]) -> dict[str, Sequence[tuple[int, ...]]]:
    half = len(rows) // 2
    return {
        "cut after its first example": [rows[:1], rows[1:]],
        "cut in the middle": [rows[:half], rows[half:]],
        "cut before its last example": [rows[:-1], rows[-1:]],
        "cut into single examples": [(row,) for row in rows],
        "in reverse order": [tuple(reversed(rows))],
    }


def _check_company(subject: Subject, scale: float, largest: float, findings: Findings) -> None:
    """Compare what an example adds to a batch with what it adds to nothing."""
    empty, whole = _release(subject, EMPTY), _release(subject, [Part(rows=subject.rows, scale=scale)])
    for row in (subject.rows[0], subject.rows[-1]):
        others = tuple(other for other in subject.rows if other != row)
        alone = _release(subject, [Part(rows=(row,), scale=scale)])
        without = _release(subject, [Part(rows=others, scale=scale)])
        apart = distance(_minus(whole, without), _minus(alone, empty))
        if apart > _TOLERANCE * largest + rounding(whole, without) + rounding(alone, empty):
            findings.report(
                Check.ISOLATION,
                f"example {row} adds something else to a batch than to nothing ({apart / subject.unit:.4g} clip norms apart). "
                "Its loss, its gradient or its weight depends on the others, or on how many they are.",
            )


def _minus(first: Coordinates, second: Coordinates) -> Coordinates:
    return {name: block.double() - second[name].double() for name, block in first.items() if name in second}
