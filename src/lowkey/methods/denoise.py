"""Gradient matrix denoising: release the full gradient, then shrink the singular values of its matrices."""

from __future__ import annotations

from dataclasses import dataclass

from lowkey.checks import Word, require_member, require_number
from lowkey.errors import ConfigError
from lowkey.factors import Kind, ParameterSpec
from lowkey.methods.method import FullGradient, Start, Strategy
from lowkey.refine.average import MovingAverage
from lowkey.refine.denoising import Denoising
from lowkey.refine.shrink import check_kappa


class Target(Word):
    """What is denoised."""

    GRADIENT = "gradient"
    MOMENTUM = "momentum"


@dataclass(frozen=True, kw_only=True)
class Denoise:
    """Release the whole gradient, and keep of each linear layer's what stands out of the noise.

    Fields:
        kappa: A matrix is left as released unless its largest singular value is above `kappa` times the edge of pure noise.
        target: Shrink each release, as the paper does, or a moving average of releases, whose noise is lower.
        norm_correction: Give a shrunk matrix the norm that it was released with.
        decay: The share of the moving average that a step keeps; of use with `target="momentum"` alone.

    Guarantee:
        That of `DPSGD`: one Gaussian release of the full gradients, and post-processing of it.

    References:
        [denoise2025], Alg. 2 and section 3.2. The moving average is ours.

    Example:
        >>> Denoise(kappa=1.05).target
        'gradient'
    """

    kappa: float = 1.02
    target: Target | str = Target.GRADIENT
    norm_correction: bool = True
    decay: float = 0.9

    def __post_init__(self) -> None:
        check_kappa(self.kappa)
        if not 0.0 <= require_number("decay", self.decay) < 1.0:
            raise ConfigError(f"decay={self.decay!r} is no share. It must lie in [0, 1). Use decay=0.9.")
        object.__setattr__(self, "target", require_member(Target, "target", self.target))

    @property
    def has_guarantee(self) -> bool:
        return True

    def start(self, start: Start) -> Strategy:
        """Become a strategy for one model."""
        names = [name for name, spec in start.specs.items() if _is_linear(spec)]
        if not names:
            raise ConfigError(
                f"there is no linear layer among {list(start.specs)[:5]}. Only matrices of linear layers are denoised. Use DPSGD()."
            )
        average = MovingAverage(self.decay) if self.target is Target.MOMENTUM else None
        refining = Denoising(names, kappa=self.kappa, norm_correction=self.norm_correction, average=average)
        return Strategy(sketching=FullGradient(start.specs), refining=refining)


def _is_linear(spec: ParameterSpec) -> bool:
    """Whether a parameter is a linear layer's matrix; convolutions, embeddings, norms and biases are not."""
    return spec.kind in (Kind.OUTPUT_FIRST, Kind.INPUT_FIRST) and len(spec.shape) == 2
