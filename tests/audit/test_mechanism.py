"""The mechanism audit on runs that keep their promises, on runs without one, and on arguments that cannot be used."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from audited import ADAM, Mlp, Twice, batch_of, cross_entropy, maker
from torch import nn

import lowkey as lk
from lowkey.audit import Check, mechanism

NUM_COORDINATES = 30_000


class Tagger(nn.Module):
    """An embedding, dropout, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 10)
        self.mix = nn.Linear(10, 10)
        self.drop = nn.Dropout(0.3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.drop(torch.tanh(self.mix(self.embedding(ids)))), self.embedding.weight)


def per_sequence(model: nn.Module, batch: Any) -> torch.Tensor:
    losses = nn.functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["ids"].roll(1, 1).flatten(), reduction="none")
    return losses.view(len(batch["ids"]), -1).mean(1)


IDS = {"ids": torch.randint(0, 24, (5, 6), generator=torch.Generator().manual_seed(1))}
SECURE = functools.partial(mechanism, noise=lk.SecureNoise)

KEEPING = {
    "DP-SGD": maker(lk.DPSGD(), optimizer=functools.partial(torch.optim.SGD, lr=0.1)),
    "tied": maker(lk.DPSGD(), model=Twice),
}


@pytest.mark.parametrize("name", KEEPING)
def test_a_run_that_keeps_its_promise_passes(name: str) -> None:
    result = mechanism(KEEPING[name], batch_of(), num_coordinates=NUM_COORDINATES)
    assert result.passed, str(result)


@pytest.mark.parametrize("method", [lk.DPSGD(), lk.Grape(rank=4, sketch_embeddings=True)], ids=repr)
def test_a_tied_model_with_dropout_is_audited_in_eval_mode_and_passes(method: Any) -> None:
    result = mechanism(maker(method, model=Tagger, loss=per_sequence), IDS, num_coordinates=NUM_COORDINATES)
    assert result.passed, str(result)
    assert "eval mode" in str(result)


def test_secure_noise_passes() -> None:
    result = SECURE(KEEPING["DP-SGD"], batch_of(), num_coordinates=NUM_COORDINATES)
    assert result.passed, str(result)


def test_an_attack_reaches_the_bound() -> None:
    """Without an attack that is clipped, a passed sensitivity check would say nothing."""
    line = next(line for line in mechanism(KEEPING["DP-SGD"], batch_of(), num_coordinates=2000).measured if "sensitivity" in line)
    assert "at most 1.0000" in line or "at most 0.9999" in line


@pytest.mark.parametrize(
    ("method", "plan"),
    [
        (lk.nonprivate.NonPrivate(), lk.Plan(noise_multiplier=1.0, delta=1e-3, num_examples=100, expected_batch_size=10, num_steps=5)),
        (lk.DPSGD(), lk.Plan(noise_multiplier=0.0, delta=1e-3, num_examples=100, expected_batch_size=10, num_steps=5)),
    ],
    ids=["no method", "no noise"],
)
def test_a_run_without_a_guarantee_is_told_so(method: Any, plan: lk.Plan) -> None:
    result = mechanism(maker(method, plan=plan), batch_of())
    assert [finding.check for finding in result.findings] == [Check.GUARANTEE]
    assert not result.passed


def test_seeded_noise_in_the_place_of_real_noise_is_no_guarantee() -> None:
    result = mechanism(KEEPING["DP-SGD"], batch_of(), noise=lambda: lk.SeededNoise(1))
    assert [finding.check for finding in result.findings] == [Check.GUARANTEE]


def test_one_planned_step_is_enough() -> None:
    plan = lk.Plan(noise_multiplier=1.0, delta=1e-3, num_examples=100, expected_batch_size=10, num_steps=1)
    result = mechanism(maker(lk.DPSGD(), plan=plan), batch_of(), num_coordinates=10_000)
    assert result.passed, str(result)


def test_a_model_built_outside_is_put_back() -> None:
    model = Mlp()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def make_private(noise: Any) -> lk.Private:
        plan = lk.Plan(noise_multiplier=1.0, delta=1e-3, num_examples=100, expected_batch_size=10, num_steps=20)
        return lk.privatize(model, ADAM, method=lk.DPSGD(), plan=plan, clip_norm=1.0, noise=noise)

    result = mechanism(make_private, batch_of(), loss=cross_entropy, num_coordinates=10_000)
    assert result.passed, str(result)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any("forward" in vars(part) for part in model.modules())


def test_torchs_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    mechanism(KEEPING["DP-SGD"], batch_of(), num_coordinates=2000)
    assert torch.equal(torch.get_rng_state(), before)


def unseeded(noise: Any) -> Any:
    return maker(lk.DPSGD())(lk.SystemNoise())


def changing_weights(noise: Any) -> Any:
    private, loss = maker(lk.DPSGD())(noise)
    with torch.no_grad():
        next(p for p in private.model.parameters() if p.requires_grad).add_(torch.empty(()).uniform_(generator=GENERATOR))
    return private, loss


GENERATOR = torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    ("make_private", "words"),
    [
        (lambda: None, "takes no argument"),
        (3, "not a function"),
        (lambda noise: None, "returned NoneType"),
        (lambda noise: maker(lk.DPSGD())(noise)[0], "loss is None"),
        (unseeded, "differ"),
        (changing_weights, "differ"),
    ],
    ids=["no argument", "no function", "nothing", "no loss", "own noise", "other weights"],
)
def test_a_make_private_that_cannot_be_audited_is_refused_with_an_example(make_private: Any, words: str) -> None:
    with pytest.raises(lk.ConfigError, match=words):
        mechanism(make_private, batch_of())


def test_one_example_cannot_be_removed_from() -> None:
    with pytest.raises(lk.ConfigError, match="at least two"):
        mechanism(KEEPING["DP-SGD"], batch_of(1))


def test_a_loss_may_take_the_model_or_only_the_batch() -> None:
    def without_loss(noise: Any) -> Any:
        return maker(lk.DPSGD())(noise)[0]

    assert mechanism(without_loss, batch_of(), loss=cross_entropy, num_coordinates=2000).passed


def test_a_standard_deviation_two_percent_off_is_seen_in_the_default_number_of_coordinates() -> None:
    from lowkey.audit.statistics import ALPHA, scale_p_value

    # The sum of squares of n normals is n ± sqrt(2 n); spoiled by 2 % it is 1.02² n. Power is asserted two standard deviations low.
    n = 200_000
    spoiled = 1.02**2 * (n - 2 * math.sqrt(2 * n))
    assert scale_p_value(spoiled, n) < ALPHA / 10
    assert scale_p_value(n + 2 * math.sqrt(2 * n), n) > 1e-2
