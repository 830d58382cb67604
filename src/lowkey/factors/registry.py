"""The one table of rules: which operation is caught by which function.

A rule receives a `Call` in which at least one argument is a trainable tensor and another is data.
It returns what the operation would have returned, and sees to it that the backward pass records each example's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from lowkey.factors.capture import Capture

Operation = Callable[..., Any]

# PRIVACY: a checkpoint repeats a function that is no module unwatched, and hands each operation of the first pass what another one saved:
# a weight for an input and an input for a weight, if shapes allow. With a mark that nothing else saves, torch finds that they differ.
MARK = torch.empty(0, 7, 1, 3)
"""What a caught operation saves for its backward pass beside its own tensors."""


@dataclass(frozen=True)
class Call:
    """One torch operation on its way through the capture."""

    capture: Capture
    function: Operation
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


Rule = Callable[[Call], Any]

RULES: dict[Operation, Rule] = {}


def rule(*functions: Operation) -> Callable[[Rule], Rule]:
    """Register a rule for `functions`."""

    def register(handler: Rule) -> Rule:
        for function in functions:
            RULES[function] = handler
        return handler

    return register


GUARDS: dict[Operation, Callable[..., None]] = {}
"""Checks that an operation on data must pass whether or not a weight takes part in it."""


def guard(function: Operation) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a check, called with the arguments of `function`."""

    def register(check: Callable[..., None]) -> Callable[..., None]:
        GUARDS[function] = check
        return check

    return register


def anything(*_args: object) -> None:
    """Stand in the table for every operation that has no rule of its own."""
