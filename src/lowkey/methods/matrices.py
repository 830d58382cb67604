"""Which parameters a low-rank method treats as matrices, and which side of them faces the layer's input."""

from __future__ import annotations

from collections.abc import Mapping

from lowkey.errors import ConfigError
from lowkey.factors import Axis, Kind, ParameterSpec


def wide_matrices(specs: Mapping[str, ParameterSpec], rank: int) -> tuple[str, ...]:
    """Return the linear, attention and convolution weights whose two sides are above `rank`.

    A matrix with a narrower side, as a small classifier's head, has no gradient of a higher rank to reduce.
    Biases, norms, embeddings and grouped convolutions are not among them.

    Raises:
        ConfigError: There are none.
    """
    kinds = (Kind.OUTPUT_FIRST, Kind.INPUT_FIRST)
    found = tuple(name for name, spec in specs.items() if spec.kind in kinds and min(spec.matrix_shape) > rank)
    if not found:
        raise ConfigError(
            f"rank={rank} leaves no matrix to reduce among {list(specs)[:5]}. "
            "A low-rank method needs a linear or convolution weight whose two sides are above the rank. "
            "Use a smaller rank, or DPSGD()."
        )
    return found


def input_axis(spec: ParameterSpec) -> Axis:
    """Return the axis of the parameter, seen as a matrix, that the layer's input runs along."""
    return Axis.ROWS if spec.kind is Kind.INPUT_FIRST else Axis.COLS
