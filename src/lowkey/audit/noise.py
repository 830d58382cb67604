"""The noise of empty batches: its scale, its shape, and whether it ever repeats or follows anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lowkey.audit.result import Check, Findings
from lowkey.audit.statistics import (
    ALPHA,
    Numbers,
    lag_score,
    largest_correlation,
    mean_p_value,
    normal_p_value,
    scale_interval,
    scale_p_value,
    shape_p_value,
)
from lowkey.audit.subject import Session, Subject
from lowkey.factors import Axis
from lowkey.release import NoiseSource
from lowkey.sketch import Sketch

_FEWEST_STEPS, _MOST_STEPS = 6, 1500
_PREFIX = 256
_MOST_COMPARED = 64
_MOST_DIRECTIONS = 128
_FIRST_ENTRIES = 16
_MOST_SAMPLED = 200_000
_LAGS = (1, 2, 3)
_NUM_TESTS = 10
"""Kinds of tests, which share alpha."""


@dataclass
class Draws:
    """Standardised noise of one block, over all steps.

    Fields:
        count: How many coordinates were seen.
        total: Their sum.
        squares: The sum of their squares.
        zeros: How many were exactly zero.
        prefixes: The first coordinates of each step.
    """

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    zeros: int = 0
    prefixes: list[Numbers] = field(default_factory=list[Numbers])

    def add(self, noise: Tensor) -> None:
        """Take one step's noise."""
        flat = noise.detach().flatten().double().cpu()
        self.count += flat.numel()
        self.total += float(flat.sum())
        self.squares += float(flat.square().sum())
        self.zeros += int((flat == 0).sum())
        self.prefixes.append(flat[:_PREFIX].numpy().copy())


def check_noise(subject: Subject, make_noise: Callable[[], NoiseSource], num_coordinates: int, findings: Findings) -> None:
    """Test the noise of empty batches, drawn from the source that the run would really use."""
    steps = _sessions(subject, num_coordinates)
    draws: dict[str, Draws] = {}
    bases: list[Numbers] = []
    directions: list[Numbers] = []
    for num_steps in steps:
        # More than one session: a source that starts alike in each is known by its repetition.
        with subject.session(make_noise()) as session:
            bases = bases or _bases(session.private.sketches)
            for _ in range(num_steps):
                if len(directions) < _MOST_DIRECTIONS:
                    directions.append(_directions(session.private.sketches))
                _take(session, subject, draws, findings)
    draws = {name: draw for name, draw in draws.items() if draw.count}
    if not draws:
        return
    for name, draw in draws.items():
        if draw.zeros:
            findings.report(Check.COVERAGE, f"{draw.zeros} of {draw.count} coordinates of '{name}' were released without any noise.")
    _check_scale(draws, sum(steps), findings)
    _check_shape(draws, findings)
    _check_steps(draws, steps[0], findings)
    _check_blocks(draws, findings)
    _check_bases(draws, bases, findings)
    _check_directions(draws, directions, findings)


def _sessions(subject: Subject, num_coordinates: int) -> list[int]:
    """Return how many steps each session takes: two sessions or more, and enough steps for the coordinates that are wanted."""
    shapes = {name: shape for sketch in subject.sketches.values() for name, shape in sketch.blocks.items()}
    width = sum(math.prod(shape) for shape in shapes.values())
    wanted = min(_MOST_STEPS, max(_FEWEST_STEPS, -(-num_coordinates // width)))
    each = min(subject.num_steps, -(-wanted // 2))
    return [each] * -(-wanted // each)


def _take(session: Session, subject: Subject, draws: dict[str, Draws], findings: Findings) -> None:
    session.releases.clear()
    session.step()
    if len(session.releases) != 1:
        findings.report(Check.EMPTY_BATCH, f"a step without examples made {len(session.releases)} releases. It must make exactly one.")
    _, noise_multiplier, _ = session.private.history[-1]
    for released in session.releases[:1]:
        for name, block in released.blocks.items():
            draws.setdefault(name, Draws()).add(block / (noise_multiplier * subject.unit))


def _check_scale(draws: Mapping[str, Draws], num_steps: int, findings: Findings) -> None:
    count, squares = sum(draw.count for draw in draws.values()), sum(draw.squares for draw in draws.values())
    low, high = scale_interval(squares, count, ALPHA)
    findings.measure(
        f"noise: {low:.4f} to {high:.4f} times the charged standard deviation, from {count} coordinates of {num_steps} empty batches"
    )
    limit = ALPHA / _NUM_TESTS
    if scale_p_value(squares, count) < limit:
        findings.report(
            Check.NOISE_SCALE,
            f"the noise has {math.sqrt(squares / count):.4g} times the standard deviation that the ledger was charged for "
            f"({count} coordinates, alpha {ALPHA:g}).",
        )
    for name, draw in draws.items():
        if scale_p_value(draw.squares, draw.count) < limit / len(draws):
            ratio = math.sqrt(draw.squares / draw.count)
            findings.report(Check.NOISE_SCALE, f"the noise of '{name}' has {ratio:.4g} times the standard deviation that was charged for.")
    for name, draw in draws.items():
        if mean_p_value(draw.total, draw.count) < limit / len(draws):
            findings.report(
                Check.NOISE_SHAPE, f"the noise of '{name}' has mean {draw.total / draw.count:.4g} times its standard deviation, not 0."
            )


def _check_shape(draws: Mapping[str, Draws], findings: Findings) -> None:
    sample = np.concatenate([prefix for draw in draws.values() for prefix in draw.prefixes])[:_MOST_SAMPLED]
    if np.any(sample) and shape_p_value(sample) < ALPHA / _NUM_TESTS:
        findings.report(
            Check.NOISE_SHAPE, f"the noise does not follow the normal law (Kolmogorov-Smirnov, {len(sample)} coordinates, alpha {ALPHA:g})."
        )


def _check_steps(draws: Mapping[str, Draws], session_length: int, findings: Findings) -> None:
    """Compare every step with every other, and with the same step of the next session."""
    rows = np.stack([np.concatenate(step) for step in zip(*(draw.prefixes for draw in draws.values()), strict=False)])
    score, pairs, (first, second) = largest_correlation(rows)
    if pairs and normal_p_value(score) * pairs < ALPHA / _NUM_TESTS:
        findings.report(
            Check.NOISE_INDEPENDENCE,
            f"the noise of step {first + 1} agrees with that of step {second + 1} ({score:.1f} standard deviations).",
        )
    for lag in {*_LAGS, session_length}:
        score = lag_score(rows, lag)
        if normal_p_value(score) < ALPHA / _NUM_TESTS / (len(_LAGS) + 1):
            findings.report(Check.NOISE_INDEPENDENCE, f"noise agrees with that of {lag} steps later ({score:.1f} standard deviations).")


def _check_blocks(draws: Mapping[str, Draws], findings: Findings) -> None:
    """Compare every block with every other: a stream of noise that two blocks share begins alike."""
    names = list(draws)
    # A sketch that begins later has blocks of its own, which fewer steps hold.
    count = min(_MOST_COMPARED, *(len(draw.prefixes) for draw in draws.values()))
    rows = np.stack([np.concatenate([_padded(prefix) for prefix in draw.prefixes[:count]]) for draw in draws.values()])
    score, pairs, (first, second) = largest_correlation(rows)
    if pairs and normal_p_value(score) * pairs < ALPHA / _NUM_TESTS:
        findings.report(
            Check.NOISE_INDEPENDENCE,
            f"the noise of '{names[first]}' agrees with that of '{names[second]}' ({score:.1f} standard deviations).",
        )


def _check_bases(draws: Mapping[str, Draws], bases: Sequence[Numbers], findings: Findings) -> None:
    """Compare noise with the bases: a key that both share makes one a multiple of the other."""
    if not bases:
        return
    noise = np.stack([_padded(prefix) for draw in draws.values() for prefix in draw.prefixes[:_MOST_COMPARED]])
    # The bases are the given vectors: they are fixed, whatever law they were drawn from.
    score, pairs, _ = largest_correlation(np.stack(bases), noise)
    if normal_p_value(score) * pairs < ALPHA / _NUM_TESTS:
        findings.report(
            Check.NOISE_INDEPENDENCE, f"the noise agrees with a basis that gradients are projected on ({score:.1f} standard deviations)."
        )


def _bases(sketches: Mapping[str, Sketch]) -> list[Numbers]:
    """Return the first entries of each basis, read along its rows and along its columns."""
    matrices = [matrix for sketch in sketches.values() for axis in Axis if (matrix := sketch.basis(axis)) is not None]
    orders = [order for matrix in matrices for order in (matrix, matrix.T)]
    return [_padded(order.flatten()[:_PREFIX].double().cpu().numpy()) for order in orders]


def _check_directions(draws: Mapping[str, Draws], directions: Sequence[Numbers], findings: Findings) -> None:
    """Compare the noise of each step with the directions that the step's coordinates stand for, over all steps."""
    if len({len(each) for each in directions}) > 1:
        return  # a sketch that begins later has no directions, and no such block, in the steps before
    given = np.stack(directions)
    if not given.size:
        return
    noise = np.stack([np.concatenate([draw.prefixes[step][:_FIRST_ENTRIES] for draw in draws.values()]) for step in range(len(given))])
    score, pairs, _ = largest_correlation(given.T, noise.T)
    if normal_p_value(score) * pairs < ALPHA / _NUM_TESTS:
        findings.report(
            Check.NOISE_INDEPENDENCE, f"the noise follows the direction that gradients are projected on ({score:.1f} standard deviations)."
        )


def _directions(sketches: Mapping[str, Sketch]) -> Numbers:
    """Return the first entries of the first direction of each sketch whose coordinates belong to no side of a matrix."""
    entries: list[Numbers] = [np.zeros(0)]
    for sketch in sketches.values():
        shapes = list(sketch.blocks.items())
        if sketch.is_identity or len(shapes) != 1 or len(shapes[0][1]) != 1 or any(sketch.basis(axis) is not None for axis in Axis):
            continue
        ((block, shape),) = shapes
        first = torch.zeros(shape, dtype=torch.float64)
        first[0] = 1.0
        entries.append(sketch.decode({block: first}).flatten()[:_FIRST_ENTRIES].double().cpu().numpy())
    return np.concatenate(entries)


def _padded(prefix: Numbers) -> Numbers:
    return np.pad(prefix, (0, _PREFIX - len(prefix)))
