"""What a checkpoint must share with the run that goes on from it, checked before anything of it is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowkey.errors import ConfigError

_FORMAT = 3


def identify(method: object, optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the entries of a checkpoint that tell which runs may go on from it."""
    return {
        "version": _FORMAT,
        "method": repr(method),
        "optimizer_class": type(optimizer).__name__,
        "weights": {name: list(weight.shape) for name, weight in weights.items()},
    }


def check_checkpoint(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that this run cannot go on from.

    Args:
        state: What is to be loaded.
        own: What `identify` says of this run.

    Raises:
        ConfigError: Something differs, with its name.
    """
    if "version" not in state:
        raise ConfigError(
            f"the state has the entries {list(state)[:3]}, and is no state of a private run. "
            "It must be what private.state_dict() returned. Where a file holds several states, pass that one alone."
        )
    for name, value in own.items():
        found = state.get(name)
        if found != value:
            shown, mine = _first_difference(found, value) if name == "weights" else (found, value)
            raise ConfigError(
                f"the checkpoint has {name}={shown}, and this run has {name}={mine}. "
                "A run goes on as it began. Build the same model, and pass the same method and the same optimizer to privatize."
            )


def _first_difference(found: Any, own: Mapping[str, list[int]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the first weight that the two do not have alike, and how each has it."""
    theirs: Mapping[str, Any] = found or {}
    name = next(name for name in (*own, *theirs) if own.get(name) != theirs.get(name))
    return {name: theirs.get(name)}, {name: own.get(name)}
