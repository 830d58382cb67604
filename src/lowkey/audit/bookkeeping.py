"""What happens around a release: the ledger, what the weights follow from, what is left behind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lowkey.audit.compare import distance, rounding
from lowkey.audit.result import Check, Findings
from lowkey.audit.sources import PlaybackNoise, RecordingNoise
from lowkey.audit.subject import EMPTY, Part, Session, Step, Subject, Trace, tensors_of, trace
from lowkey.release import SeededNoise

_SEED = 13
_LOUD = 1e3
_MOST_SEEDS = 16
"""Noise that shows its sign alone looks like none with a probability of 2^-15."""


def check_ledger(subject: Subject, findings: Findings) -> None:
    """Compare what was charged, and when, with what was claimed and done."""
    noise = RecordingNoise(_SEED)
    loud = [Part(rows=subject.rows, scale=_LOUD)]
    with subject.session(noise) as session:
        uncharged: list[int] = []

        def before_draw(step: int) -> None:
            if session.private.history[-1][2] <= len(session.releases):
                uncharged.append(step)

        noise.before_draw = before_draw
        for number, step in enumerate([loud, EMPTY, loud][: subject.num_steps]):
            before = session.private.history
            session.step(step)
            _check_charge(subject, before, session.private.history, number, findings)
        claimed = session.private.statement()
    if uncharged:
        findings.report(
            Check.LEDGER, f"step {uncharged[0]} drew its noise before it was charged. A crash in between would forget the release."
        )
    if claimed.num_steps != len(session.releases):
        findings.report(Check.LEDGER, f"the statement counts {claimed.num_steps} releases, and {len(session.releases)} were made.")


def _check_charge(
    subject: Subject, before: Sequence[tuple[float, float, int]], after: Sequence[tuple[float, float, int]], number: int, findings: Findings
) -> None:
    charged = after[-1][2] - before[-1][2]
    if charged != 1 or after[:-1] != before[:-1]:
        findings.report(Check.LEDGER, f"step {number + 1} was charged {charged} times. Each step is one release, charged once.")
    rate, noise_multiplier, _ = after[-1]
    claims = subject.claims
    for name, found, claimed in (
        ("sampling rate", rate, claims.expected_batch_size / claims.num_examples),
        ("stated sampling rate", claims.sampling_rate, claims.expected_batch_size / claims.num_examples),
        ("noise multiplier", noise_multiplier, claims.noise_multiplier),
    ):
        if not math.isclose(found, claimed, rel_tol=1e-9):
            findings.report(Check.LEDGER, f"the {name} is {found:g}, and the run's own numbers give {claimed:g}.")


def check_post_processing(subject: Subject, findings: Findings) -> None:
    """Replay the releases of a run with examples in a run without any: the weights must come out the same."""
    steps: list[Step] = [[Part(rows=subject.rows, scale=_LOUD)], [Part(rows=subject.rows)], EMPTY]
    steps = steps[: subject.num_steps]
    noise = RecordingNoise(_SEED)
    with subject.session(noise) as session:
        start = {name: parameter.detach().clone() for name, parameter in session.trained().items()}
        for step in steps:
            session.step(step)
        real = trace(session)
    playback = PlaybackNoise(noise.sums)
    replayed = subject.run([EMPTY] * len(steps), playback)
    if playback.missing:
        findings.report(Check.EMPTY_BATCH, f"{len(playback.missing)} draws of noise depend on whether a step has examples. They must not.")
    elif len(real.releases) != len(steps) or len(replayed.releases) != len(steps):
        findings.report(
            Check.EMPTY_BATCH, f"{len(steps)} steps made {len(real.releases)} releases with examples and {len(replayed.releases)} without."
        )
    elif any(distance(a.blocks, b.blocks) > rounding(a.blocks, b.blocks) for a, b in zip(real.releases, replayed.releases, strict=True)):
        findings.report(Check.POST_PROCESSING, "something is added to the release after the noise: the same noised sum gave two releases.")
    else:
        _check_same_end(real, replayed, start, findings)


def _check_same_end(real: Trace, replayed: Trace, start: Mapping[str, Tensor], findings: Findings) -> None:
    for name, weight in real.weights.items():
        if _differs(weight, replayed.weights[name], start[name]):
            findings.report(
                Check.POST_PROCESSING,
                f"'{name}' moved differently under equal releases, so something reached it past the noise or chose its basis.",
            )
    pairs = zip(real.moments, replayed.moments, strict=False)
    if len(real.moments) != len(replayed.moments) or any(_differs(a, b, torch.zeros_like(a)) for a, b in pairs):
        findings.report(Check.POST_PROCESSING, "the optimizer's state differs under equal releases, so it has seen more than them.")


def _differs(first: Tensor, second: Tensor, start: Tensor) -> bool:
    if first.shape != second.shape:
        return True
    if not first.is_floating_point() or first.numel() == 0:
        return not torch.equal(first, second)
    slack = 1e-5 * float((first - start).abs().max()) + 4.0 * torch.finfo(first.dtype).eps * float(first.abs().max())
    return not float((first - second).abs().max()) <= slack


def check_carry_over(subject: Subject, findings: Findings) -> None:
    """Look at an empty step after a loud one: its release must be that of an empty step after an empty one."""
    if subject.num_steps < 2:
        return
    after_loud = subject.run([[Part(rows=subject.rows, scale=_LOUD)], EMPTY], SeededNoise(_SEED))
    after_quiet = subject.run([EMPTY, EMPTY], SeededNoise(_SEED))
    first, second = after_loud.release(1), after_quiet.release(1)
    if not first or not second:
        findings.report(Check.EMPTY_BATCH, "a step without examples made no release.")
    elif distance(first, second) > rounding(first, second):
        findings.report(Check.CARRY_OVER, "the release of an empty step depends on the examples of the step before.")
    public = [[(r.noise_std, r.l2_bound) for r in run.releases] for run in (after_loud, after_quiet)]
    if public[0] != public[1]:
        findings.report(
            Check.CARRY_OVER, f"bounds and noise levels follow the examples: {public[0]} after a loud step, {public[1]} after an empty one."
        )


def check_coverage(subject: Subject, findings: Findings) -> None:
    """Look for parameters that examples move and noise does not."""
    loud = [Part(rows=subject.rows, scale=_LOUD)]
    first, second = (subject.run([loud], SeededNoise(seed)).weights for seed in (_SEED, _SEED + 1))
    quiet = subject.run([EMPTY], SeededNoise(_SEED)).weights
    suspects = {name for name in first if torch.equal(first[name], second[name]) and not torch.equal(first[name], quiet[name])}
    for seed in range(_SEED + 1, _SEED + _MOST_SEEDS):
        # Adam's first step shows signs alone, and loud examples decide those; noise on its own has both.
        if not suspects:
            return
        other = subject.run([EMPTY], SeededNoise(seed)).weights
        suspects = {name for name in suspects if torch.equal(quiet[name], other[name])}
    for name in sorted(suspects):
        findings.report(Check.COVERAGE, f"'{name}' was moved by examples and by no noise.")


def check_side_effects(subject: Subject, findings: Findings) -> None:
    """Look for gradients, buffers, frozen weights and anything else that keeps something of a batch."""
    with subject.session(SeededNoise(_SEED)) as session:
        before = {name: value.detach().clone() for name, value in tensors_of(session.model).items()}
        names = set(session.model.state_dict())
        session.backward(Part(rows=subject.rows, scale=_LOUD))
        _check_unchanged(session, before, set(), "a backward pass", findings)
        session.private.step()
        _check_unchanged(session, before, set(session.trained()), "a step", findings)
        if set(session.model.state_dict()) != names:
            findings.report(Check.SIDE_EFFECTS, "the model's state_dict has other names than before.")
    _check_gradients(session, "close()", findings)


def _check_unchanged(session: Session, before: Mapping[str, Tensor], may_move: set[str], when: str, findings: Findings) -> None:
    for name, value in tensors_of(session.model).items():
        if name not in may_move and not torch.equal(value, before[name]):
            findings.report(Check.SIDE_EFFECTS, f"'{name}' changed in {when}, and no release changes it.")
    _check_gradients(session, when, findings)


def _check_gradients(session: Session, when: str, findings: Findings) -> None:
    stepped = [tensor for group in session.private.optimizer.param_groups for tensor in group["params"]]
    for name, parameter in session.model.named_parameters():
        if parameter.grad is not None:
            findings.report(Check.SIDE_EFFECTS, f"'{name}'.grad holds a gradient after {when}.")
    if any(tensor.grad is not None for tensor in stepped):
        findings.report(Check.SIDE_EFFECTS, f"a tensor that the optimizer steps holds a gradient after {when}.")
