"""Slopes along a public direction from losses alone, without a backward pass."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from lowkey.boundary import PerExample
from lowkey.factors.factor import Dense, Factor, wide_dtype


def probe(
    losses: Callable[[], Tensor], parameters: Mapping[str, Tensor], directions: Mapping[str, Tensor], *, scale: float, block: str
) -> PerExample[Factor] | None:
    """Take each example's central difference `(f(w + scale u) - f(w - scale u)) / (2 scale)`.

    Args:
        losses: Runs the model on a microbatch, and returns one loss per example.
        parameters: The trained weights `w`; they are as they were when this returns.
        directions: The direction `u`, by parameter.
        scale: Half the distance between the two points.
        block: The name of the one coordinate that stands for the direction.

    Returns:
        One number per example; None of a microbatch without examples.

    Guarantee:
        Row `b` depends on example `b` only, where a model keeps examples apart.
        Both points see the same random numbers, so dropout cancels.

    Assumes:
        The direction was drawn before the batch, with a key that is no noise key.

    Cost:
        Two forward passes, and one more copy of the weights.
    """
    with torch.no_grad(), _lent(parameters, directions) as move:
        move(scale)
        with _same_randomness(parameters):
            ahead = losses()
        if not ahead.numel():
            return None
        move(-scale)
        behind = losses()
    # NUMERICS: the difference of two nearly equal losses is taken in the dtype that sums are held in.
    dtype = wide_dtype(ahead.dtype)
    slopes = (ahead.to(dtype) - behind.to(dtype)) / (2.0 * scale)
    return PerExample({block: Dense(slopes[:, None])}, len(slopes))


@contextmanager
def _lent(parameters: Mapping[str, Tensor], directions: Mapping[str, Tensor]) -> Generator[Callable[[float], None]]:
    """Let the parameters hold other numbers for a while, and put the very same ones back, whatever happens in between."""
    before = {name: parameter.data for name, parameter in parameters.items()}

    def move(distance: float) -> None:
        for name, weight in before.items():
            torch.add(weight, directions[name].to(weight.dtype), alpha=distance, out=parameters[name].data)

    try:
        for parameter in parameters.values():
            parameter.data = torch.empty_like(parameter)
        yield move
    finally:
        for name, parameter in parameters.items():
            parameter.data = before[name]


@contextmanager
def _same_randomness(parameters: Mapping[str, Tensor]) -> Generator[None]:
    """Let what runs next draw the same random numbers as this."""
    device = next(iter(parameters.values())).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
