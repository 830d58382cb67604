"""Linear probing: train the head alone, on the features that the model has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lowkey.errors import ConfigError
from lowkey.factors import Kind, ParameterSpec
from lowkey.methods.method import FullGradient, Start, Strategy


@dataclass(frozen=True, kw_only=True)
class LinearProbe:
    """Release the gradient of the head, and leave every other weight as it is.

    Fields:
        head: Name of the module to train; by default the one that owns the last trainable matrix.

    Guarantee:
        That of `DPSGD`: the head's joint vector is clipped, and nothing else is released.

    References:
        [yu2021rgp], Tables 2 and 3, rows "Linear".

    Example:
        >>> LinearProbe(head="classifier")
        LinearProbe(head='classifier')
    """

    head: str | None = None

    @property
    def has_guarantee(self) -> bool:
        return True

    def start(self, start: Start) -> Strategy:
        """Become a strategy for one model."""
        head = _last_matrix(start.specs).rpartition(".")[0] if self.head is None else self.head
        chosen = {name: spec for name, spec in start.specs.items() if not head or name == head or name.startswith(f"{head}.")}
        if not chosen:
            raise ConfigError(
                f"head='{head}' holds no trainable parameter. It must name a module of the model. "
                f"Pass one of {sorted({name.rpartition('.')[0] for name in start.specs})[-5:]}."
            )
        return Strategy(sketching=FullGradient(chosen))


def _last_matrix(specs: Mapping[str, ParameterSpec]) -> str:
    matrices = [name for name, spec in specs.items() if spec.kind is not Kind.OTHER and spec.kind is not Kind.EMBEDDING]
    if not matrices:
        raise ConfigError(
            f"no linear or convolution weight is among the trainable parameters {list(specs)[:5]}, so there is no head to find. "
            "Name it: LinearProbe(head='classifier')."
        )
    return matrices[-1]
