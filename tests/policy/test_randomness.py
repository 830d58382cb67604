"""Noise is added in one place, and every draw names its generator."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from repository import name_of, nodes_of, source_files

RELEASE_OF_NOISE = {"release/gaussian.py"}
NOISE_SOURCES = {"release/noise.py", "release/secure.py", "audit/sources.py"}
"""They define a draw; one builds on another. Those of an audit say themselves that they have no guarantee."""

INSIDE_A_FORK = {"audit/subject.py": ["torch.manual_seed(0)"]}
"""An audit repeats a user's own dropout, which draws from torch's generator; it does so in `fork_rng`, which puts the generator back."""

DRAWS_OF_TORCH = {
    "bernoulli",
    "multinomial",
    "normal",
    "poisson",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
}
DRAWS_IN_PLACE = {"bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"}
GLOBAL_SEEDS = {"manual_seed", "seed"}


def calls(path: Path) -> list[ast.Call]:
    return [node for node in nodes_of(path) if isinstance(node, ast.Call)]


def draws_noise(call: ast.Call) -> bool:
    """Whether a call has the shape of `NoiseSource.normal` or `NoiseSource.add_`, or names a helper around them."""
    if isinstance(call.func, ast.Name):
        return call.func.id == "noise_like"
    if not isinstance(call.func, ast.Attribute):
        return False
    return call.func.attr == "noise_like" or (
        call.func.attr in {"add_", "normal"} and {"step", "index"} <= {word.arg for word in call.keywords}
    )


def hides_its_generator(call: ast.Call) -> bool:
    """Whether a call draws from a global generator, or moves one."""
    if not isinstance(call.func, ast.Attribute):
        return False
    owner = ast.unparse(call.func.value)
    named = any(word.arg == "generator" for word in call.keywords)
    if owner == "torch":
        return call.func.attr in GLOBAL_SEEDS or (call.func.attr in DRAWS_OF_TORCH and not named)
    if owner in {"np.random", "numpy.random"}:
        return call.func.attr[:1].islower() and (call.func.attr != "default_rng" or not call.args)
    if owner == "random":
        return call.func.attr[:1].islower()
    return call.func.attr in DRAWS_IN_PLACE and not named


@pytest.mark.parametrize("path", source_files(), ids=name_of)
def test_noise_is_drawn_only_where_it_is_released(path: Path) -> None:
    if name_of(path) in RELEASE_OF_NOISE | NOISE_SOURCES:
        return
    assert [call.lineno for call in calls(path) if draws_noise(call)] == []


@pytest.mark.parametrize("path", source_files(), ids=name_of)
def test_every_draw_names_its_generator(path: Path) -> None:
    assert [ast.unparse(call) for call in calls(path) if hides_its_generator(call)] == INSIDE_A_FORK.get(name_of(path), [])


@pytest.mark.parametrize(
    "call", ["source.add_(total, std, step=1, index=0)", "self.noise.normal(x, 1.0, step=n, index=i)", "noise_like(s, x, 1.0)"]
)
def test_the_search_finds_a_second_place_that_draws_noise(call: str) -> None:
    node = ast.parse(call, mode="eval").body
    assert isinstance(node, ast.Call)
    assert draws_noise(node)


@pytest.mark.parametrize(
    "call",
    ["torch.randn(3)", "x.normal_()", "np.random.normal()", "np.random.default_rng()", "random.random()", "torch.manual_seed(0)"],
)
def test_the_search_finds_a_hidden_generator(call: str) -> None:
    node = ast.parse(call, mode="eval").body
    assert isinstance(node, ast.Call)
    assert hides_its_generator(node)


@pytest.mark.parametrize("call", ["torch.randn(3, generator=g)", "x.add_(y)", "np.random.default_rng(5)", "np.random.Generator(bits)"])
def test_the_search_lets_a_named_generator_pass(call: str) -> None:
    node = ast.parse(call, mode="eval").body
    assert isinstance(node, ast.Call)
    assert not hides_its_generator(node)
