"""Denoise against its formula: full decompositions in float64 on noisy releases, and a torch optimizer that follows them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from audited import batch_of, maker
from dense_shrink import CLIP_NORM, LINEAR, denoise_beside_its_formula
from dense_steps import NO_NOISE, NOISE, OPTIMIZERS, SUBJECTS, assert_same_weights, clipped_mean, dense_gradients, take, trained, twins
from torch import nn

import lowkey as lk
from lowkey.methods import Target

QUIET = dataclasses.replace(NOISE, noise_multiplier=0.05)
"""So little noise that matrices of these sizes stand out of it."""

METHODS = {
    "gradient": lk.Denoise(kappa=1.1),
    "gradient, any norm": lk.Denoise(kappa=1.1, norm_correction=False),
    "momentum": lk.Denoise(kappa=1.1, target="momentum", decay=0.6),
    "momentum, any norm": lk.Denoise(kappa=1.1, target=Target.MOMENTUM, decay=0.6, norm_correction=False),
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


@every_method
@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_denoise_is_its_formula_on_noisy_releases(method: lk.Denoise, subject: str, optimizer: str) -> None:
    formula = denoise_beside_its_formula(method, subject, optimizer, QUIET)
    assert formula.num_shrunk > 0


@every_method
def test_where_noise_hides_everything_releases_are_followed_as_they_are(method: lk.Denoise) -> None:
    assert denoise_beside_its_formula(method, "MLP", "SGD", NOISE).num_shrunk == 0


@every_method
@pytest.mark.parametrize("subject", SUBJECTS)
def test_without_noise_nothing_is_shrunk(method: lk.Denoise, subject: str) -> None:
    assert denoise_beside_its_formula(method, subject, "AdamW", NO_NOISE).num_shrunk == 0


@pytest.mark.parametrize("subject", SUBJECTS)
def test_without_noise_it_is_dpsgd_without_noise(subject: str) -> None:
    build, batch = SUBJECTS[subject]
    model, dense = twins(build)
    stepper = OPTIMIZERS["Adam"](list(trained(dense).values()))
    with lk.privatize(model, OPTIMIZERS["Adam"], method=lk.Denoise(), plan=NO_NOISE, clip_norm=CLIP_NORM) as private:
        for _ in range(3):
            take(private, model, batch)
            for name, gradient in clipped_mean(dense_gradients(dense, batch), CLIP_NORM, NO_NOISE.expected_batch_size).items():
                trained(dense)[name].grad = gradient
            stepper.step()
    assert_same_weights(model, dense)


def followed(method: lk.Denoise, subject: str) -> set[str]:
    """The parameters that plain SGD moves along something else than the release."""
    build, batch = SUBJECTS[subject]
    model, before = twins(build)
    released: dict[str, torch.Tensor] = {}
    sgd = functools.partial(torch.optim.SGD, lr=1.0)
    with lk.privatize(model, sgd, method=method, plan=QUIET, clip_norm=CLIP_NORM, noise=lk.SeededNoise(3)) as private:
        private.on_release(lambda release: released.update({name: block.clone() for name, block in release.blocks.items()}))
        take(private, model, batch)
    moved = {name: trained(before)[name] - weight for name, weight in trained(model).items()}
    return {name for name, step in moved.items() if not torch.allclose(step, released[name], rtol=1e-9, atol=1e-12)}


@pytest.mark.parametrize("subject", SUBJECTS)
def test_only_matrices_of_linear_layers_are_changed(subject: str) -> None:
    changed = followed(lk.Denoise(kappa=1.0), subject)
    assert changed
    assert changed <= set(LINEAR[subject])


# -- a run that goes on ------------------------------------------------------------------------------------------------


@every_method
@pytest.mark.parametrize("saved_after", [1, 3])
def test_a_resumed_run_shrinks_what_an_uninterrupted_one_does(method: lk.Denoise, saved_after: int, tmp_path: Any) -> None:
    make = maker(method, plan=QUIET)
    private, loss = make(lk.SeededNoise(4))
    with private:
        for _ in range(saved_after):
            private.backward(loss(batch_of()))
            private.step()
        torch.save((private.state_dict(), private.model.state_dict()), tmp_path / "run.pt")
        for _ in range(2):
            private.backward(loss(batch_of()))
            private.step()
        expected = {name: weight.clone() for name, weight in private.model.state_dict().items()}
    state, weights = torch.load(tmp_path / "run.pt", weights_only=True)
    again, loss = make(lk.SeededNoise(4))
    with again:
        again.model.load_state_dict(weights)
        again.load_state_dict(state)
        for _ in range(2):
            again.backward(loss(batch_of()))
            again.step()
        assert all(torch.equal(weight, expected[name]) for name, weight in again.model.state_dict().items())


@pytest.mark.parametrize("name", ["gradient", "momentum"])
def test_a_run_with_little_noise_passes_the_audit(name: str) -> None:
    result = lk.audit.mechanism(maker(METHODS[name], plan=QUIET), batch_of(), num_coordinates=20_000)
    assert result.passed, str(result)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kappa": 0.9}, "kappa=0.9 is no threshold"),
        ({"target": "weights"}, "target='weights' is not known. It must be one of 'gradient', 'momentum'"),
        ({"decay": 1.0}, r"decay=1.0 is no share. It must lie in \[0, 1\)"),
        ({"decay": -0.1}, "decay=-0.1 is no share"),
        ({"decay": "0.9"}, "decay='0.9' is a str"),
        ({"kappa": None}, "kappa=None is a NoneType"),
        ({"kappa": True}, "kappa=True is a bool"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(lk.ConfigError, match=message):
        lk.Denoise(**options)


def test_a_model_without_linear_layers_is_refused() -> None:
    model = nn.Conv2d(1, 2, 3)
    with pytest.raises(lk.ConfigError, match="there is no linear layer among"):
        lk.privatize(model, OPTIMIZERS["SGD"], method=lk.Denoise(), plan=NOISE, clip_norm=1.0)


def test_a_name_of_a_target_is_the_target() -> None:
    assert lk.Denoise(target="momentum") == lk.Denoise(target=Target.MOMENTUM)
