"""GaLore on noised gradients, and on exact ones, from its formula: singular vectors of the whole gradient, and an optimizer among them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dense_steps import NO_NOISE, NOISE, SUBJECTS, clipped_mean, dense_gradients, take, trained, twins
from torch import Tensor, nn

import lowkey as lk

RANK, REFRESH, STEPS = 3, 2, 5
KINDS: dict[str, tuple[Any, dict[str, float]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.2}),
}


def leading(gradient: Tensor) -> tuple[Tensor, bool]:
    """Return the leading singular vectors of the smaller side, and whether that is the side of the rows."""
    matrix = gradient.flatten(1)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return (left[:, :RANK], True) if matrix.shape[0] <= matrix.shape[1] else (right[:RANK].T, False)


class Dense:
    """Algorithm 5 with whole matrices; the signs of singular vectors are free, and no step depends on them."""

    def __init__(self, model: nn.Module, optimizer: str) -> None:
        self.weights = trained(model)
        self.kind, self.options = KINDS[optimizer]
        self.names = [name for name, weight in self.weights.items() if weight.dim() > 1 and min(weight.flatten(1).shape) > RANK]
        self.bases: dict[str, tuple[Tensor, bool]] = {}
        self.proxies: dict[str, nn.Parameter] = {}
        self.steppers: dict[str, torch.optim.Optimizer] = {}
        self.count = 0

    def step(self, gradients: dict[str, Tensor]) -> None:
        if self.count % REFRESH == 0:
            self.refresh(gradients)
        self.count += 1
        for name, weight in self.weights.items():
            if name not in self.bases:
                stepper = self.steppers.setdefault(name, self.kind([weight], **self.options))
                weight.grad = gradients[name]
                stepper.step()
                continue
            basis, is_left = self.bases[name]
            flat = gradients[name].flatten(1)
            reduced = basis.T @ flat if is_left else flat @ basis
            proxy = self.proxies.setdefault(name, nn.Parameter(torch.zeros_like(reduced)))
            stepper = self.steppers.setdefault(name, self.kind([proxy], **{**self.options, "weight_decay": 0.0}))
            proxy.grad = reduced
            stepper.step()
            with torch.no_grad():
                weight.mul_(1 - self.options["lr"] * self.options.get("weight_decay", 0.0))
                weight.add_((basis @ proxy if is_left else proxy @ basis.T).reshape(weight.shape))
                proxy.zero_()

    def refresh(self, gradients: dict[str, Tensor]) -> None:
        for name in self.names:
            self.bases[name] = leading(gradients[name])


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("optimizer", KINDS)
@pytest.mark.parametrize("noisy", [False, True], ids=["exact", "noised"])
def test_naive_galore_is_its_formula(subject: str, optimizer: str, noisy: bool) -> None:
    build, batch = SUBJECTS[subject]
    model, other = twins(build)
    dense = Dense(other, optimizer)
    kind, options = KINDS[optimizer]
    releases: list[dict[str, Tensor]] = []
    method = lk.NaiveGaLore(rank=RANK, refresh_every=REFRESH)
    with lk.privatize(
        model,
        lambda tensors: kind(tensors, **options),
        method=method,
        plan=NOISE if noisy else NO_NOISE,
        clip_norm=0.3,
        noise=lk.SeededNoise(3),
    ) as private:
        private.on_release(lambda release: releases.append({name: block.clone() for name, block in release.blocks.items()}))
        # Moments of one basis in the next depend on the vectors' signs, which no formula fixes; without moments nothing does.
        for _ in range(STEPS if optimizer == "SGD" else REFRESH):
            gradients = clipped_mean(dense_gradients(other, batch), 0.3, NO_NOISE.expected_batch_size)
            take(private, model, batch)
            if not noisy:
                for name, gradient in gradients.items():
                    torch.testing.assert_close(releases[-1][name], gradient, rtol=1e-8, atol=1e-10)
            dense.step(releases[-1])
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("optimizer", KINDS)
def test_galore_is_the_same_without_limit_and_noise(optimizer: str) -> None:
    build, batch = SUBJECTS["MLP"]
    model, other = twins(build)
    dense = Dense(other, optimizer)
    kind, options = KINDS[optimizer]
    method = lk.nonprivate.GaLore(rank=RANK, refresh_every=REFRESH)
    with lk.privatize(model, lambda tensors: kind(tensors, **options), method=method, plan=NOISE, clip_norm=0.3) as private:
        for _ in range(STEPS if optimizer == "SGD" else REFRESH):
            gradients = {name: value.sum(0) / NOISE.expected_batch_size for name, value in dense_gradients(other, batch).items()}
            take(private, model, batch)
            dense.step(gradients)
        assert private.epsilon == float("inf")
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("options", [{"rank": 0}, {"rank": 2, "refresh_every": 0}, {"rank": 1.5}], ids=str)
@pytest.mark.parametrize("method", [lk.NaiveGaLore, lk.nonprivate.GaLore])
def test_options_that_mean_nothing_are_refused(method: Any, options: dict[str, Any]) -> None:
    with pytest.raises(lk.ConfigError):
        method(**options)
