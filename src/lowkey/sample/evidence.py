"""How many batches lowkey itself drew for a plan, so that a statement claims no more than what happened."""

from __future__ import annotations

import weakref
from dataclasses import dataclass


@dataclass
class _Tally:
    drawn: int = 0
    seeded: int = 0


_tallies: dict[int, tuple[weakref.ref[object], _Tally]] = {}


def record_draw(plan: object, *, seeded: bool) -> None:
    """Count one batch that was handed out for `plan`.

    Args:
        plan: The plan that the batch was drawn for.
        seeded: Whether a seed decided the draw, so that whoever knows it can repeat it.

    Guarantee:
        Counts are kept by the identity of the plan: an equal plan of another run gets none of them.
    """
    tally = _tally(plan)
    if tally is None:
        key = id(plan)
        tally = _Tally()
        # The entry leaves with the plan, before another object can be given the same identity.
        _tallies[key] = (weakref.ref(plan, lambda _: _tallies.pop(key, None)), tally)
    tally.drawn += 1
    tally.seeded += seeded


def num_drawn(plan: object) -> int:
    """Count the batches that lowkey drew for this very plan object, in this process.

    Guarantee:
        A batch counts once it was handed out, not when it was prefetched.
    """
    tally = _tally(plan)
    return tally.drawn if tally else 0


def num_seeded(plan: object) -> int:
    """Count those of `num_drawn` that a seed decided.

    Guarantee:
        Above zero, amplification by sampling holds only against those who do not know the seed.
    """
    tally = _tally(plan)
    return tally.seeded if tally else 0


def _tally(plan: object) -> _Tally | None:
    entry = _tallies.get(id(plan))
    return entry[1] if entry is not None and entry[0]() is plan else None
