"""What a ledger knows about a run, and what a checkpoint knows about its ledger."""

from __future__ import annotations

import functools
import platform
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from itertools import pairwise
from types import MappingProxyType
from typing import Any, assert_never

from lowkey.account.events import Event
from lowkey.account.plan import Plan
from lowkey.account.sampling import Poisson, Sampling, TruncatedPoisson, Unsampled, count_epochs
from lowkey.account.statement import RELATION, NoiseOrigin
from lowkey.errors import ConfigError, LedgerError


@functools.cache
def _versions() -> Mapping[str, str]:
    found = {"python": platform.python_version()}
    for name in ("lowkey", "dp-accounting"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return MappingProxyType(found)


@dataclass(frozen=True, kw_only=True)
class RunHeader:
    """The public facts of one training run, written before its first release.

    Fields:
        plan: Noise, sampler, sizes and the number of releases.
        dataset: The user's name for the private data; runs on one name compose.
        clip_norm: The L2 limit per example, when there is one.
        method: Name of the training method.
        noise_source: Where the noise comes from; seeded noise gives the run an infinite epsilon.
        versions: Versions of whatever made the run.
        run_id: A random name for the run; a resumed run keeps its own.

    Guarantee:
        Holds nothing that depends on a private example, and no key or seed.
    """

    plan: Plan
    dataset: str = "unnamed"
    clip_norm: float | None = None
    method: str = "unnamed"
    noise_source: NoiseOrigin | None = None
    versions: Mapping[str, str] = field(default_factory=_versions, hash=False, compare=False)
    run_id: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def num_steps(self) -> int:
        """How many releases the plan allows."""
        return self.plan.num_steps

    def events(self, num_steps: int, returns: Sequence[int] = ()) -> list[Event]:
        """Return ``num_steps`` releases of this run, in the terms that compose; seeded noise counts as none.

        Args:
            num_steps: Releases in all.
            returns: How many of them had been made at each return to an earlier checkpoint, in ascending order.

        Guarantee:
            Shuffled batches that are taken again meet their examples again, so each stretch of steps between two returns is charged
            for as often as one example can join in it, wherever in an epoch it lies. Draws by coins need no such charge.
        """
        if not (isinstance(self.plan.sampling, Unsampled) and returns):
            return [self._noised(self.plan.event(num_steps))]
        # PRIVACY: counted in one stretch, steps that were taken again within an epoch would look like steps of other examples.
        stretches = [stop - start for start, stop in pairwise((*returns, num_steps))]
        repeats = sum(min(length, 1 + self._count_epochs(length)) for length in stretches)
        again = replace(self.plan.event(repeats), sampling_rate=1.0, sampling=Poisson())
        return [self._noised(self.plan.event(returns[0])), self._noised(again)]

    def _noised(self, event: Event) -> Event:
        # PRIVACY: whoever knows the seed subtracts the noise.
        return replace(event, noise_multiplier=0.0) if self.noise_source is NoiseOrigin.SEEDED else event

    def _count_epochs(self, num_steps: int) -> int:
        plan = self.plan
        return count_epochs(num_steps=num_steps, expected_batch_size=plan.expected_batch_size, num_examples=plan.num_examples)


@dataclass(frozen=True, kw_only=True)
class Head:
    """A ledger's state as a checkpoint stores it.

    Fields:
        run_id: The run that the checkpoint belongs to.
        num_records: How many records the ledger had; 0 for a ledger in memory.
        chain: Hash over all of them; empty for a ledger in memory.
        num_intents: How many releases the run had been charged for.
    """

    run_id: str
    num_records: int
    chain: str
    num_intents: int


def header_to_json(header: RunHeader) -> dict[str, Any]:
    """Write a header as the body of a record."""
    plan = header.plan
    return {
        "run_id": header.run_id,
        "dataset": header.dataset,
        "num_examples": int(plan.num_examples),
        "expected_batch_size": int(plan.expected_batch_size),
        "sampling_rate": plan.sampling_rate,
        "noise_multiplier": float(plan.noise_multiplier),
        "delta": float(plan.delta),
        "num_steps": int(plan.num_steps),
        "sampling": _sampling_to_json(plan.sampling),
        "clip_norm": None if header.clip_norm is None else float(header.clip_norm),
        "relation": RELATION,
        "method": header.method,
        "noise_source": None if header.noise_source is None else header.noise_source.value,
        "versions": dict(header.versions),
    }


def header_from_json(body: Mapping[str, Any]) -> RunHeader:
    """Read a header back.

    Raises:
        LedgerError: If the body is not a header that this version understands.
    """
    try:
        plan = Plan(
            noise_multiplier=body["noise_multiplier"],
            delta=body["delta"],
            num_examples=body["num_examples"],
            expected_batch_size=body["expected_batch_size"],
            num_steps=body["num_steps"],
            sampling=_sampling_from_json(body["sampling"]),
        )
        return RunHeader(
            plan=plan,
            dataset=body["dataset"],
            clip_norm=body["clip_norm"],
            method=body["method"],
            noise_source=None if body["noise_source"] is None else NoiseOrigin(body["noise_source"]),
            versions=body["versions"],
            run_id=body["run_id"],
        )
    except (KeyError, TypeError, ConfigError, ValueError) as error:
        raise LedgerError(
            f"a run record of the ledger cannot be read: {error}. It must hold a plan that lowkey understands. "
            "Read it with the version that wrote it."
        ) from error


def check_same_run(recorded: RunHeader, given: RunHeader) -> None:
    """Check that a resumed run is what it was, but for the number of steps it may still take.

    Raises:
        LedgerError: Naming the first field that differs.
    """
    for name, before, now in (
        ("dataset", recorded.dataset, given.dataset),
        ("method", recorded.method, given.method),
        ("clip_norm", recorded.clip_norm, given.clip_norm),
        ("noise_source", recorded.noise_source, given.noise_source),
        ("num_examples", recorded.plan.num_examples, given.plan.num_examples),
        ("expected_batch_size", recorded.plan.expected_batch_size, given.plan.expected_batch_size),
        ("noise_multiplier", recorded.plan.noise_multiplier, given.plan.noise_multiplier),
        ("sampling", recorded.plan.sampling, given.plan.sampling),
    ):
        if before != now:
            raise LedgerError(
                f"{name}={now!r} differs from {before!r}, which run {recorded.run_id} has recorded. "
                "A resumed run must release what it did before. Restore the setting, or start a new run in the same ledger."
            )


def _sampling_to_json(sampling: Sampling) -> dict[str, Any]:
    match sampling:
        case Poisson():
            return {"kind": "poisson"}
        case TruncatedPoisson(max_batch_size=cap):
            return {"kind": "truncated_poisson", "max_batch_size": int(cap)}
        case Unsampled():
            return {"kind": "unsampled"}
        case _:
            assert_never(sampling)


def _sampling_from_json(body: Mapping[str, Any]) -> Sampling:
    match body["kind"]:
        case "poisson":
            return Poisson()
        case "truncated_poisson":
            return TruncatedPoisson(max_batch_size=body["max_batch_size"])
        case "unsampled":
            return Unsampled()
        case kind:
            raise ValueError(f"unknown sampler {kind!r}")
