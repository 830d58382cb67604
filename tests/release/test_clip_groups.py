"""Blocks that are clipped apart keep, together, the bound that noise and statement go by."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import lowkey as lk
from lowkey.boundary import PerExample
from lowkey.factors import Dense
from lowkey.release import ClipGroup, ClippedSum

SHAPES = {"a": (3,), "b": (2, 2), "c": (5,)}
CPU = torch.device("cpu")


def groups_of(share: float) -> tuple[ClipGroup, ClipGroup]:
    return (
        ClipGroup(blocks=frozenset({"a", "b"}), share=share),
        ClipGroup(blocks=frozenset({"c"}), share=math.sqrt(1.0 - share**2)),
    )


def drawn(seed: int, scale: float, batch_size: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(batch_size, *shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def summed(values: dict[str, Tensor], groups: tuple[ClipGroup, ...], clip_norm: float = 1.0) -> dict[str, Tensor]:
    total = ClippedSum(SHAPES, clip_norm, torch.float64, CPU, groups)
    total.add(PerExample({name: Dense(value) for name, value in values.items()}, len(values["a"])))
    found = total.take()
    assert found.l2_bound == clip_norm
    return dict(found._blocks)


@given(st.integers(0, 2**31), st.sampled_from([1e-3, 1.0, 1e6]), st.floats(0.05, 0.95))
def test_the_sum_moves_by_at_most_the_clip_norm_when_one_example_leaves(seed: int, scale: float, share: float) -> None:
    values = drawn(seed, scale)
    without = {name: value[1:] for name, value in values.items()}
    whole, part = (summed(each, groups_of(share), 0.7) for each in (values, without))
    moved = math.sqrt(sum(float((whole[name] - part[name]).square().sum()) for name in SHAPES))
    assert moved <= 0.7 * (1 + 1e-9)


def test_each_group_has_a_joint_norm_of_its_own() -> None:
    values, share = drawn(1, 5.0), 0.6
    found = summed(values, groups_of(share))
    for names, limit in ((("a", "b"), share), (("c",), math.sqrt(1.0 - share**2))):
        norms = torch.stack([values[name].flatten(1).square().sum(1) for name in names]).sum(0).sqrt()
        for name in names:
            expected = torch.einsum("b...,b->...", values[name], (limit / norms).clamp_max(1.0))
            torch.testing.assert_close(found[name], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_example_that_is_not_finite_in_one_group_counts_for_nothing_in_any(bad: float) -> None:
    values = drawn(2, 1.0)
    without = {name: value[1:] for name, value in values.items()}
    values["c"][0, 0] = bad
    found, expected = summed(values, groups_of(0.6)), summed(without, groups_of(0.6))
    assert all(torch.equal(found[name], expected[name]) for name in SHAPES)


def group(names: set[str], share: float) -> ClipGroup:
    return ClipGroup(blocks=frozenset(names), share=share)


REFUSED = {
    "a block without a group": ((group({"a", "b"}, 0.5),), "exactly one group"),
    "a block in two groups": ((group({"a", "b", "c"}, 0.5), group({"c"}, 0.5)), "exactly one group"),
    "a block that no sketch fills": ((group({"a", "b", "c", "d"}, 1.0),), "exactly one group"),
    "shares whose squares exceed one": ((group({"a", "b"}, 0.8), group({"c"}, 0.7)), "add up"),
    "a share of zero": ((group({"a", "b"}, 1.0), group({"c"}, 0.0)), "positive"),
    "a share that is no number": ((group({"a", "b"}, 0.5), group({"c"}, math.nan)), "positive"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_groups_that_would_break_the_bound_are_refused(name: str) -> None:
    groups, words = REFUSED[name]
    with pytest.raises(lk.ConfigError, match=words):
        ClippedSum(SHAPES, 1.0, torch.float64, CPU, groups)
