"""Sketches of a kernel's input channels against one-sided sketches with a Kronecker product for a basis, and inside whole runs."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from audited import cross_entropy, maker
from dense_steps import NO_NOISE, clipped_mean, dense_gradients, twins
from torch import Tensor, nn

import lowkey as lk
from lowkey.boundary import Provenance
from lowkey.factors import Axis, Outer
from lowkey.sketch import Channels, OneSided

OUTPUTS, INPUTS, KEPT = 5, 6, 2
every_kernel = pytest.mark.parametrize("taps", [(3, 2), (4,), (2, 1, 2)], ids=str)


def pair(taps: tuple[int, ...]) -> tuple[Channels, OneSided]:
    matrix = torch.randn(INPUTS, KEPT, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    shape = (OUTPUTS, INPUTS, *taps)
    kronecker = torch.kron(matrix, torch.eye(torch.Size(taps).numel(), dtype=torch.float64))
    return Channels("w", shape, matrix, Provenance.RANDOM), OneSided("w", shape, Axis.COLS, kronecker, Provenance.RANDOM)


@every_kernel
def test_it_is_the_kronecker_product_of_its_basis_and_the_taps(taps: tuple[int, ...]) -> None:
    channels, flat = pair(taps)
    gradients = torch.randn(3, OUTPUTS, INPUTS, *taps, dtype=torch.float64)
    found, expected = (sketch.compress_dense(gradients)["w"].value for sketch in (channels, flat))
    torch.testing.assert_close(found.flatten(2), expected, rtol=0, atol=1e-12)
    assert found.shape[1:] == channels.blocks["w"]
    decoded = channels.decode({"w": found[0]})
    torch.testing.assert_close(decoded, flat.decode({"w": expected[0]}), rtol=0, atol=1e-12)
    torch.testing.assert_close(channels.encode(gradients[1])["w"], found[1], rtol=0, atol=1e-12)


@every_kernel
def test_patches_are_reduced_as_gradients_are(taps: tuple[int, ...]) -> None:
    channels, flat = pair(taps)
    rows, cols = torch.randn(3, 7, OUTPUTS, dtype=torch.float64), torch.randn(3, 7, INPUTS * torch.Size(taps).numel(), dtype=torch.float64)
    outer = Outer(rows, cols, channels.shape)
    found, expected = (sketch.compress(outer, None)["w"].dense() for sketch in (channels, flat))
    torch.testing.assert_close(found.flatten(2), expected, rtol=0, atol=1e-12)


def test_coordinates_rotate_into_a_later_basis() -> None:
    channels, flat = pair((3, 2))
    later = Channels("w", channels.shape, torch.randn(INPUTS, 3, dtype=torch.float64), Provenance.RANDOM)
    late_flat = OneSided("w", flat.shape, Axis.COLS, torch.kron(later.matrix, torch.eye(6, dtype=torch.float64)), Provenance.RANDOM)
    coordinates = torch.randn(channels.proxy_shape, dtype=torch.float64)
    found, expected = channels.rotate_to(later, "w", coordinates), flat.rotate_to(late_flat, "w", coordinates.flatten(1))
    assert found is not None
    torch.testing.assert_close(found.flatten(1), expected, rtol=0, atol=1e-12)
    assert channels.rotate_to(flat, "w", coordinates) is None


class Strided(nn.Module):
    """Convolutions whose inputs have many channels: one keeps its resolution, one halves it, one is used on two inputs; and one of a
    single tap, whose input is reduced at once because its stride leaves a quarter of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 24, 3, padding=1)
        self.second = nn.Conv2d(24, 30, 3, stride=2, padding=1)
        self.again = nn.Conv2d(30, 30, 3, padding="same")
        self.shortcut = nn.Conv2d(24, 30, 1, stride=2, bias=False)
        self.head = nn.Linear(30, 4)

    def forward(self, images: Tensor) -> Tensor:
        first = torch.tanh(self.first(images))
        hidden = self.second(first) + self.shortcut(first)
        hidden = torch.tanh(self.again(torch.tanh(self.again(hidden))))
        return self.head(hidden.mean((2, 3)))


def images(count: int = 5, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {
        "x": torch.randn(count, 2, 6, 6, generator=generator, dtype=dtype),
        "y": torch.randint(0, 4, (count,), generator=generator),
    }


SGD = functools.partial(torch.optim.SGD, lr=1.0)


def test_grape_keeps_whole_channels_where_the_rank_holds_one_and_they_are_at_most_half() -> None:
    with lk.privatize(Strided(), SGD, method=lk.Grape(rank=9), plan=NO_NOISE, clip_norm=1.0) as private:
        kinds = {name: type(sketch) for name, sketch in private.sketches.items() if "weight" in name}
        shapes = {name: dict(sketch.blocks)[name] for name, sketch in private.sketches.items()}
    assert kinds["second.weight"] is kinds["again.weight"] is kinds["first.weight"] is Channels
    assert (shapes["first.weight"], shapes["second.weight"]) == ((24, 1, 3, 3), (30, 1, 3, 3))
    with lk.privatize(Strided(), SGD, method=lk.Grape(rank=6), plan=NO_NOISE, clip_norm=1.0) as private:
        assert isinstance(private.sketches["second.weight"], OneSided)


@pytest.mark.parametrize("sizes", [(5,), (2, 3), (1,) * 5], ids=str)
@pytest.mark.parametrize("clip_norm", [0.05, 1e6])
def test_a_step_is_that_of_gradients_that_were_formed_and_sketched(sizes: tuple[int, ...], clip_norm: float) -> None:
    model, dense = twins(Strided)
    batch = images()
    with lk.privatize(model, SGD, method=lk.Grape(rank=9), plan=NO_NOISE, clip_norm=clip_norm, seed=7) as private:
        sketches = private.sketches
        for x, y in zip(batch["x"].split(list(sizes)), batch["y"].split(list(sizes)), strict=True):
            private.backward(cross_entropy(model, {"x": x, "y": y}))
        private.step()
    vectors = {name: sketches[name].compress_dense(value)[name].dense() for name, value in dense_gradients(dense, batch).items()}
    for name, step in clipped_mean(vectors, clip_norm, NO_NOISE.expected_batch_size).items():
        before, after = dense.get_parameter(name), model.get_parameter(name)
        torch.testing.assert_close(after, before - sketches[name].decode({name: step}), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("distribution", ["gaussian", "stiefel"])
def test_decoding_what_was_sketched_is_right_on_average(distribution: str) -> None:
    torch.manual_seed(1)
    model = Strided().double()
    gradient = torch.randn(30, 24, 3, 3, dtype=torch.float64)
    total, draws = torch.zeros_like(gradient), 600
    for seed in range(draws):
        method = lk.Grape(rank=18, distribution=distribution)
        with lk.privatize(model, SGD, method=method, plan=NO_NOISE, clip_norm=1.0, seed=seed) as private:
            sketch = private.sketches["second.weight"]
            total += sketch.decode(sketch.encode(gradient))
    # One draw is off by sqrt(C / K + 1) < 3.7 times the gradient's length at most; the mean of many by that over the root of their number.
    assert float((total / draws - gradient).norm() / gradient.norm()) < 3.0 * 3.7 / draws**0.5


@pytest.mark.parametrize("on_refresh", ["keep", "rotate", "reset"])
def test_the_audit_passes(on_refresh: str) -> None:
    method: Any = lk.Grape(rank=9, refresh_every=1, on_refresh=on_refresh)
    result = lk.audit.mechanism(maker(method, model=Strided), images(dtype=torch.float32), num_coordinates=2_000)
    assert result.passed, str(result)
