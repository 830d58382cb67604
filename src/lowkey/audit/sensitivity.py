"""Paired runs with the same noise, with and without one example: what is left is what that example did."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch import nn

from lowkey.audit.compare import distance, is_finite, rounding
from lowkey.audit.result import Check, Findings
from lowkey.audit.spoil import Aimed, ScaledInput, ScaledLoss, has_floats, top_direction
from lowkey.audit.subject import Coordinates, Part, Session, Spoil, Subject
from lowkey.release import SeededNoise

TOLERANCE = 1e-5
"""How far beyond the clip norm, relatively, an example may move a release by rounding of its own norm."""

_FACTORS = (0.1, 1.0, 3.3, 37.0, 2.1e3, 1.7e6, 1e12, 1e30)
_INPUT_FACTORS = (0.3, 29.0, 3.1e4, 1e12, 1e30, math.nan, math.inf)
_AIMED_FACTORS = (1.3, 7.7e4)
_MOST_MODULES = 6
_SEED = 11


def check_sensitivity(subject: Subject, findings: Findings) -> None:
    """Remove one example, of every kind that the audit can think of, and look how far the release moves."""
    largest, label, count = 0.0, "", 0
    for record in (subject.rows[-1], subject.rows[0]):
        others = tuple(row for row in subject.rows if row != record)
        without = _release(subject, Part(rows=others))
        spoils = _spoils(subject) if count == 0 else [ScaledLoss(factor=factor) for factor in (1.0, 2.1e3)]
        for spoil in spoils:
            moved = _moved(subject, without, Part(rows=(*others, record), spoil=spoil), findings)
            count += 1
            if moved > largest:
                largest, label = moved, spoil.label
        _check_not_finite(subject, without, (*others, record), findings)
    findings.measure(
        f"sensitivity: one example moved the release by at most {largest:.6f} clip norms ({count} attacks; the largest: {label})"
    )


def _release(subject: Subject, part: Part) -> Coordinates:
    return subject.run([[part]], SeededNoise(_SEED)).release()


def _moved(subject: Subject, without: Coordinates, part: Part, findings: Findings) -> float:
    """Return the movement in units of the clip norm."""
    label = part.spoil.label if part.spoil else ""
    found = _release(subject, part)
    if not is_finite(found):
        findings.report(Check.NOT_FINITE, f"with {label}, one example made the release not finite.")
        return math.inf
    moved = distance(found, without) / subject.unit
    if moved > 1.0 + TOLERANCE + rounding(found, without) / subject.unit:
        findings.report(Check.SENSITIVITY, f"with {label}, one example moved the release by {moved:.6g} times the clip norm.")
    return moved


def _check_not_finite(subject: Subject, without: Coordinates, rows: tuple[int, ...], findings: Findings) -> None:
    for factor in (math.nan, math.inf):
        found = _release(subject, Part(rows=rows, spoil=ScaledLoss(factor=factor)))
        if not is_finite(found) or distance(found, without) > 1e-3 * subject.unit + rounding(found, without):
            findings.report(Check.NOT_FINITE, f"an example whose loss is {factor} changed the release. It must count for exactly nothing.")


def _spoils(subject: Subject) -> list[Spoil]:
    spoils: list[Spoil] = [ScaledLoss(factor=factor) for factor in _FACTORS]
    with subject.session(SeededNoise(_SEED)) as session:
        if has_floats(session.batch):
            spoils += [ScaledInput(factor=factor) for factor in _INPUT_FACTORS]
        spoils += list(_aimed(session))
    return spoils


def _aimed(session: Session) -> Iterator[Spoil]:
    """Aim at some modules, and at the direction that each sketch stretches the most."""
    trained = {id(parameter): name for name, parameter in session.trained().items()}
    owners = [
        (module_name, [trained[id(parameter)] for parameter in module.parameters(recurse=False) if id(parameter) in trained], module)
        for module_name, module in session.model.named_modules()
        if any(id(parameter) in trained for parameter in module.parameters(recurse=False))
    ]
    sketched = [owner for owner in owners if any(not session.private.sketches[name].is_identity for name in owner[1])]
    chosen = _spread(sketched, _MOST_MODULES // 2) + _spread(owners, _MOST_MODULES // 2)
    for module_name, names, module in chosen:
        for factor in _AIMED_FACTORS:
            yield Aimed(module_name, factor=factor)
        for name in names:
            if not session.private.sketches[name].is_identity:
                yield from _at_the_top(session, module_name, module, name)


def _at_the_top(session: Session, module_name: str, module: nn.Module, name: str) -> Iterator[Spoil]:
    sketch, parameter = session.private.sketches[name], session.trained()[name]
    rows, cols = top_direction(sketch, parameter)
    # A linear layer's gradient is (output gradient) x (input); one that is stored input-first is the other way round.
    is_turned = parameter.dim() == 2 and not isinstance(module, nn.Linear | nn.Embedding)
    outputs, inputs = (cols, rows) if is_turned or isinstance(module, nn.Embedding) else (rows, cols)
    for factor in _AIMED_FACTORS:
        yield Aimed(module_name, factor=factor, outputs=outputs, inputs=inputs)


def _spread(owners: Sequence[tuple[str, list[str], nn.Module]], count: int) -> list[tuple[str, list[str], nn.Module]]:
    """Return some of the modules, evenly spread, the first and the last among them."""
    if len(owners) <= count:
        return list(owners)
    return [owners[round(i * (len(owners) - 1) / (count - 1))] for i in range(count)]
