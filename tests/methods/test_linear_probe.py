"""The head alone is trained, as DP-SGD would train it."""

from __future__ import annotations

import pytest
import torch
from dense_steps import NO_NOISE, OPTIMIZERS, SUBJECTS, clipped_mean, dense_gradients, take, trained, twins

import lowkey as lk

HEADS = {"MLP": "body.5", "used twice": "head", "convolutions": "head", "input-first": "head"}


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_probe_is_the_private_step_of_the_head(subject: str, optimizer: str) -> None:
    build, batch = SUBJECTS[subject]
    model, dense = twins(build)
    head = {name: parameter for name, parameter in trained(dense).items() if name.startswith(HEADS[subject])}
    stepper = OPTIMIZERS[optimizer](list(head.values()))
    with lk.privatize(model, OPTIMIZERS[optimizer], method=lk.LinearProbe(), plan=NO_NOISE, clip_norm=0.3) as private:
        assert set(private.sketches) == set(head)
        for _ in range(3):
            take(private, model, batch)
            vectors = {name: value for name, value in dense_gradients(dense, batch).items() if name in head}
            for name, gradient in clipped_mean(vectors, 0.3, NO_NOISE.expected_batch_size).items():
                head[name].grad = gradient
            stepper.step()
    for mine, theirs in zip(model.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


def test_everything_is_trainable_again_after_closing() -> None:
    model = twins(SUBJECTS["MLP"][0])[0]
    before = [parameter.requires_grad for parameter in model.parameters()]
    with lk.privatize(model, OPTIMIZERS["SGD"], method=lk.LinearProbe(head="body.2"), plan=NO_NOISE, clip_norm=1.0):
        assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == ["body.2.weight", "body.2.bias"]
    assert [parameter.requires_grad for parameter in model.parameters()] == before


def test_a_head_that_is_not_there_is_refused_with_those_that_are() -> None:
    model = twins(SUBJECTS["MLP"][0])[0]
    with pytest.raises(lk.ConfigError, match=r"body\.5"):
        lk.privatize(model, OPTIMIZERS["SGD"], method=lk.LinearProbe(head="classifier"), plan=NO_NOISE, clip_norm=1.0)


def test_a_model_without_a_matrix_must_name_its_head() -> None:
    with pytest.raises(lk.ConfigError, match="no head to find"):
        lk.privatize(torch.nn.LayerNorm(4), OPTIMIZERS["SGD"], method=lk.LinearProbe(), plan=NO_NOISE, clip_norm=1.0)
