"""What was never private: the gradients of examples that their owner declared public."""

from __future__ import annotations

from collections.abc import Mapping

from lowkey.boundary import PerExample, Public
from lowkey.factors import Factor


def open_declared(per_example: PerExample[Factor], public: Public) -> Mapping[str, Factor]:
    """Return the factors of public examples.

    Args:
        per_example: Taken from a backward pass over `public.loss(model, public.examples)` and nothing else.
        public: The declaration.

    Guarantee:
        None, and none is needed: its owner gave these examples away. Nothing checks the declaration.

    Assumes:
        The model's weights are functions of releases, so that the gradients reveal nothing but the public examples.
    """
    assert isinstance(public, Public), "only a declaration opens per-example values"
    # PRIVACY: opened because the owner of these examples declared them public; no signature takes a private batch along with them.
    return per_example._blocks  # pyright: ignore[reportPrivateUsage] # reason: public examples have nothing to hide
