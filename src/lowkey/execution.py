"""Choices of speed and checking that never change a release."""

from __future__ import annotations

from dataclasses import dataclass

from lowkey.checks import Word, require_member


class CheckIsolation(Word):
    """When a backward pass also checks that no example touches another's gradient."""

    FIRST = "first"
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a step is computed, as opposed to what it releases.

    Fields:
        check_isolation: FIRST checks the first backward pass that holds two or more examples, at the cost of one more backward pass,
            and later ones until every parameter has had a gradient; ALWAYS checks each one; NEVER leaves it to `lowkey.audit`.

    Example:
        >>> Execution().check_isolation
        'first'
    """

    check_isolation: CheckIsolation = CheckIsolation.FIRST

    def __post_init__(self) -> None:
        object.__setattr__(self, "check_isolation", require_member(CheckIsolation, "check_isolation", self.check_isolation))
