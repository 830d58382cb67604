"""The gradients of public examples are those of a loop, before a run is attached and while it is."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import pytest
import torch
from audited import Mlp, batch_of, cross_entropy
from per_example import looped
from torch import Tensor

import lowkey as lk
from lowkey.methods.method import FullGradient, Start, Strategy

PLAN = lk.Plan(noise_multiplier=1.0, delta=1e-3, num_examples=100, expected_batch_size=10, num_steps=100)
SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Asking:
    """A method that keeps what it was started with."""

    def __init__(self) -> None:
        self.start_: Start | None = None
        self.at_start: dict[str, Tensor] = {}

    @property
    def has_guarantee(self) -> bool:
        return True

    def start(self, start: Start) -> Strategy:
        self.start_ = start
        self.at_start = joined(start.public_gradients(public()))
        return Strategy(sketching=FullGradient(start.specs))


def public() -> lk.Public:
    return lk.Public(batch_of(5, dtype=torch.float64), cross_entropy)


def joined(chunks: Iterator[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    parts = list(chunks)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


@pytest.fixture
def model() -> Mlp:
    torch.manual_seed(0)
    return Mlp().double()


@pytest.mark.parametrize("numbers", [1, 4_000, 1 << 26])
def test_public_gradients_are_those_of_a_loop_however_they_are_cut(model: Mlp, numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowkey.gradients._PUBLIC_NUMBERS", numbers)
    method, batch = Asking(), batch_of(5, dtype=torch.float64)
    expected = looped(model, cross_entropy, batch)
    with lk.privatize(model, SGD, method=method, plan=PLAN, clip_norm=1.0) as private:
        assert_same(method.at_start, expected)
        private.backward(cross_entropy(model, batch))
        private.step()
        assert_same(joined(method.start_.public_gradients(public())), looped(copy_of(model), cross_entropy, batch))


def copy_of(model: Mlp) -> Mlp:
    twin = Mlp().double()
    twin.load_state_dict(model.state_dict())
    return twin


def test_a_public_pass_between_forward_and_backward_changes_no_release(model: Mlp) -> None:
    batch = batch_of(4, dtype=torch.float64)
    releases: list[dict[str, Tensor]] = []
    for asks in (False, True):
        method = Asking()
        with lk.privatize(copy_of(model), SGD, method=method, plan=PLAN, clip_norm=1.0, noise=lk.SeededNoise(1)) as private:
            private.on_release(lambda release: releases.append({name: block.clone() for name, block in release.blocks.items()}))
            losses = cross_entropy(private.model, batch)
            if asks:
                joined(method.start_.public_gradients(public()))
            private.backward(losses)
            private.step()
    assert all(torch.equal(releases[0][name], releases[1][name]) for name in releases[0])


def test_a_parameter_that_public_examples_alone_reach_is_still_missing(model: Mlp) -> None:
    def headless(model: Mlp, batch: Mapping[str, Tensor]) -> Tensor:
        return model.body[0](batch["x"]).square().mean(1)

    method = Asking()
    with lk.privatize(model, SGD, method=method, plan=PLAN, clip_norm=1.0) as private:
        joined(method.start_.public_gradients(public()))
        private.backward(headless(model, batch_of(3, dtype=torch.float64)))
        with pytest.raises(lk.ConfigError, match="no backward pass has reached"):
            private.step()


def test_an_error_in_the_public_loss_leaves_the_run_as_it_was(model: Mlp) -> None:
    method, batch = Asking(), batch_of(3, dtype=torch.float64)
    with lk.privatize(model, SGD, method=method, plan=PLAN, clip_norm=1.0) as private:
        with pytest.raises(lk.ShapeError, match="one loss per example"):
            joined(method.start_.public_gradients(lk.Public(batch, lambda model, part: cross_entropy(model, part).mean())))
        private.backward(cross_entropy(model, batch))
        assert private.step().step == 1
    assert all(parameter.grad is None for parameter in model.parameters())
