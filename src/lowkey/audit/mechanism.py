"""Try to break the guarantee of a run: its noise, its sensitivity, its bookkeeping, on the model in front of us."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowkey.audit.bookkeeping import check_carry_over, check_coverage, check_ledger, check_post_processing, check_side_effects
from lowkey.audit.compare import distance, rounding
from lowkey.audit.invariance import check_invariance
from lowkey.audit.noise import check_noise
from lowkey.audit.result import AuditResult, Check, Findings
from lowkey.audit.sensitivity import check_sensitivity
from lowkey.audit.subject import EMPTY, Loss, MakePrivate, Part, Subject
from lowkey.errors import ConfigError, UnsupportedLayerError
from lowkey.release import NoiseSource, SeededNoise, SystemNoise

_CHECKS = (
    check_ledger,
    check_carry_over,
    check_post_processing,
    check_coverage,
    check_side_effects,
    check_sensitivity,
    check_invariance,
)


def mechanism(
    make_private: MakePrivate,
    batch: Any,
    *,
    loss: Loss | None = None,
    noise: Callable[[], NoiseSource] = SystemNoise,
    num_coordinates: int = 200_000,
) -> AuditResult:
    """Check that a private run does what its statement says, by running it on worst cases.

    The run is built some dozens of times, so use a small copy of the model where the real one is large.

    Args:
        make_private: Called with a noise source; builds the model and returns `(private, loss)`, or `private` alone if `loss` is given.
            Every call must build the same run: the same weights, and the same `seed` if the method has random bases. Leave its ledger out.
        batch: Two or more examples, in the form that `loss` takes. Five of them are used.
        loss: Called with `(model, batch)` or `(batch)`; returns one loss per example.
        noise: Makes the noise source whose noise is tested; everything else is tested with seeded noise.
        num_coordinates: How much noise to look at. 200,000 tells a standard deviation from one 2 % larger.

    Returns:
        What was found. `.passed` is True if nothing was.

    Raises:
        ConfigError: `make_private` or `batch` cannot be used, with an example of what can.

    Guarantee:
        A mechanism that keeps its promise fails with probability below 1e-6. Passing proves nothing: it means that none of some hundred
        attempts succeeded.

    Cost:
        About a hundred short runs; seconds for a small model.

    Example:
        >>> import functools, torch, lowkey as lk
        >>> plan = lk.Plan(noise_multiplier=1.0, delta=1e-3, num_examples=100, expected_batch_size=10, num_steps=100)
        >>> def make_private(noise):
        ...     torch.manual_seed(0)
        ...     model = torch.nn.Linear(6, 4)
        ...     sgd = functools.partial(torch.optim.SGD, lr=0.1)
        ...     private = lk.privatize(model, sgd, method=lk.DPSGD(), plan=plan, clip_norm=1.0, noise=noise, seed=0)
        ...     return private, lambda batch: model(batch["x"]).square().mean(1)
        >>> result = lk.audit.mechanism(make_private, {"x": torch.randn(4, 6)})
        >>> result.passed
        True
        >>> print(str(result).splitlines()[0])
        PASSED: nothing was found
    """
    findings = Findings()
    subject = Subject(make_private, batch, loss)
    if subject.is_resting:
        findings.measure("the model draws random numbers in training mode, as dropout does, and was audited in eval mode")
    _check_guarantee(subject, noise, findings)
    if not findings.result().passed:
        return findings.result()
    _check_repeatable(subject)
    check_noise(subject, noise, num_coordinates, findings)
    for check in _CHECKS:
        try:
            check(subject, findings)
        except UnsupportedLayerError as error:
            findings.report(Check.ISOLATION, f"the run itself refused the batch: {error}")
    return findings.result()


def _check_guarantee(subject: Subject, noise: Callable[[], NoiseSource], findings: Findings) -> None:
    with subject.session(noise()) as session:
        session.step()
        claimed = session.private.statement()
    if not claimed.has_guarantee or claimed.clip_norm is None or claimed.noise_multiplier <= 0.0:
        findings.report(Check.GUARANTEE, f"the run claims no guarantee, so there is nothing to uphold. It states: {claimed.headline}")


def _check_repeatable(subject: Subject) -> None:
    """Make sure that two runs differ by nothing that the audit did not change."""
    step = [Part(rows=subject.rows)]
    try:
        first, second = (subject.run([step, EMPTY][: subject.num_steps], SeededNoise(1)) for _ in range(2))
    except UnsupportedLayerError:
        return  # the checks will say so
    pairs = [(first.release(number), second.release(number)) for number in range(len(first.releases))]
    if any(distance(a, b) > rounding(a, b) for a, b in pairs) or distance(first.weights, second.weights) > 1e3 * rounding(
        first.weights, second.weights
    ):
        raise ConfigError(
            "two runs of make_private with the same noise differ. An audit compares runs, so they must start alike. "
            "Use the noise source that is passed in, build the model from the same weights, and pass seed=0 to privatize."
        )
