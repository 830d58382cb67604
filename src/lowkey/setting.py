"""The arguments of `privatize`, checked before anything is spent."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass

from lowkey.account import NoiseOrigin, Plan, RunHeader
from lowkey.checks import require_number, require_seed
from lowkey.errors import ConfigError
from lowkey.execution import Execution
from lowkey.factors import Selection
from lowkey.methods import Method
from lowkey.optim import GroupOptions
from lowkey.release import NoiseSource, SecureNoise

_KINDS = {
    "method": ("start", "a method", "lk.DPSGD()"),
    "noise": ("add_", "a noise source", "lk.SystemNoise()"),
    "plan": ("noise_multiplier", "a plan", "lk.calibrate(...)"),
    "execution": ("check_isolation", "an Execution", "lk.Execution()"),
}
"""What each of these arguments must have, what to call it, and what to pass."""

_SMALLEST_CLIP_NORM, _LARGEST_CLIP_NORM = 1e-8, 1e15


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a run is made of, as `privatize` was told."""

    method: Method
    plan: Plan
    clip_norm: float
    noise: NoiseSource
    ledger: str | os.PathLike[str] | None
    dataset: str
    trainable: Selection
    groups: GroupOptions | None
    execution: Execution
    seed: int

    def __post_init__(self) -> None:
        self._check_kinds()
        self._check_clip_norm()

    def _check_clip_norm(self) -> None:
        clip_norm = require_number("clip_norm", self.clip_norm)
        if not clip_norm > 0:
            raise ConfigError(f"clip_norm={clip_norm!r} is not a limit. It must be a positive number. Start with clip_norm=1.0.")
        if math.isinf(clip_norm) and self.plan.noise_multiplier > 0:
            raise ConfigError(
                "clip_norm=inf with noise would make the noise infinite. Noise is in proportion to the limit. "
                "Use a finite clip_norm, or noise_multiplier=0."
            )
        if not _SMALLEST_CLIP_NORM <= clip_norm <= _LARGEST_CLIP_NORM and not math.isinf(clip_norm):
            # PRIVACY: norms are summed in float32, whose squares vanish or overflow beyond these.
            raise ConfigError(
                f"clip_norm={clip_norm!r} is out of reach of float32, in which norms are taken. "
                f"It must lie in [{_SMALLEST_CLIP_NORM:g}, {_LARGEST_CLIP_NORM:g}]. Scale the losses by a public constant."
            )

    def _check_kinds(self) -> None:
        for name, (wanted, kind, example) in _KINDS.items():
            value = getattr(self, name)
            if isinstance(value, type) or not hasattr(value, wanted):
                raise ConfigError(f"{name}={value!r} is not {kind}. It must be an instance. Pass one, as {name}={example}.")
        if self.groups is not None and not callable(self.groups):
            raise ConfigError(
                f"groups is a {type(self.groups).__name__}. It must be a function of a parameter's name, for the optimizer may step other "
                'tensors than the model\'s. Pass groups=lambda name: {"weight_decay": 0.0 if name.endswith("bias") else 0.01}.'
            )
        require_seed("seed", self.seed)

    @property
    def header(self) -> RunHeader:
        """The public facts that the ledger writes down."""
        # PRIVACY: a method that adds no noise is charged as such, whatever the plan hoped for.
        plan = dataclasses.replace(self.plan, noise_multiplier=self.noise_multiplier)
        clip_norm = self.bound if math.isfinite(self.bound) else None
        return RunHeader(plan=plan, dataset=self.dataset, clip_norm=clip_norm, method=repr(self.method), noise_source=self.noise_origin)

    @property
    def noise_origin(self) -> NoiseOrigin:
        """What the statement says of the noise."""
        if not self.noise.has_guarantee:
            return NoiseOrigin.SEEDED
        return NoiseOrigin.SECURE if isinstance(self.noise, SecureNoise) else NoiseOrigin.SYSTEM

    @property
    def bound(self) -> float:
        """The clip norm that holds; a method without a guarantee does not clip."""
        return float(self.clip_norm) if self.method.has_guarantee else math.inf

    @property
    def noise_multiplier(self) -> float:
        """The noise multiplier that holds; a method without a guarantee adds none."""
        return self.plan.noise_multiplier if self.method.has_guarantee else 0.0
