"""Is the release the clipped sum of the loop's gradients, however the batch is split and whatever the sketch?"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import pytest
import torch
from per_example import Batch, Watched, looped
from torch import Tensor, nn
from torch.nn import functional as F

import lowkey as lk
from lowkey.boundary import PerExample
from lowkey.factors import Axis
from lowkey.release import ClippedSum
from lowkey.sketch import Distribution, OneSided, draw_basis

EXAMPLES, POSITIONS, FEATURES, VOCABULARY = 6, 4, 5, 9
EXPECTED_BATCH_SIZE = 10


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(24)
    yield
    torch.set_default_dtype(torch.float32)


class Small(nn.Module):
    """One layer of each family, and a head that is tied to the table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, FEATURES)
        self.where = nn.Parameter(torch.randn(1, POSITIONS, FEATURES))
        self.norm = nn.LayerNorm(FEATURES)
        self.attention = nn.MultiheadAttention(FEATURES, 1, batch_first=True)
        self.conv = nn.Conv1d(POSITIONS, POSITIONS, 3, padding=1)
        self.up = nn.Linear(FEATURES, 7)
        self.down = nn.Linear(7, FEATURES)
        self.memory = nn.GRU(FEATURES, FEATURES, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.where
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.memory(self.conv(x))[0]
        x = x + self.down(F.gelu(self.up(x)))
        return F.linear(x, self.table.weight)


def losses(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).transpose(1, 2), batch["tokens"], reduction="none").mean(1)


def tokens() -> dict[str, Tensor]:
    return {"tokens": torch.randint(0, VOCABULARY, (EXAMPLES, POSITIONS))}


def clipped_sum(gradients: Mapping[str, Tensor], clip_norm: float) -> dict[str, Tensor]:
    squares = sum(value.reshape(len(value), -1).square().sum(1) for value in gradients.values())
    assert isinstance(squares, Tensor)
    weights = (clip_norm / squares.sqrt()).clamp(max=1.0)
    return {name: torch.einsum("b,b...->...", weights, value) for name, value in gradients.items()}


def a_plan() -> lk.Plan:
    return lk.Plan(noise_multiplier=0.0, delta=1e-5, num_examples=100, expected_batch_size=EXPECTED_BATCH_SIZE, num_steps=5)


@pytest.mark.parametrize("sizes", [(6,), (3, 3), (1, 5), (4, 1, 1), (1,) * 6], ids=str)
@pytest.mark.parametrize("clip_norm", [1e-3, 0.5, 1e3])
def test_weights_move_by_the_clipped_mean_however_the_batch_is_split(sizes: tuple[int, ...], clip_norm: float) -> None:
    model, batch = Small(), tokens()
    expected = clipped_sum(looped(model, losses, batch), clip_norm)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    sgd = functools.partial(torch.optim.SGD, lr=1.0)
    with lk.privatize(model, sgd, method=lk.DPSGD(), plan=a_plan(), clip_norm=clip_norm) as private:
        for part in batch["tokens"].split(list(sizes)):
            private.backward(losses(model, {"tokens": part}))
        private.step()
    for name, parameter in model.named_parameters():
        moved = (before[name] - parameter.detach()) * EXPECTED_BATCH_SIZE
        # The weights are of size one and their step may be 1e-4 of it, so the difference keeps 1e-12 of the step.
        torch.testing.assert_close(moved, expected[name], rtol=1e-9, atol=1e-13)


class Mixed(nn.Module):
    """Layers in single precision, each family's factors among them, under a head in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Small().float()
        self.conv = nn.Conv2d(1, 2, 3).float()
        self.head = nn.Linear(2 * (POSITIONS - 2) * (VOCABULARY - 2), VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.conv(self.body(tokens)[:, None]).flatten(1).double())


def test_layers_of_two_precisions_are_clipped_and_summed_in_the_longer_one() -> None:
    def mixed_losses(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["tokens"]), batch["tokens"][:, 0], reduction="none")

    model, batch = Mixed(), tokens()
    expected = clipped_sum({name: value.double() for name, value in looped(model, mixed_losses, batch).items()}, 0.5)
    released: dict[str, Tensor] = {}
    sgd = functools.partial(torch.optim.SGD, lr=1.0)
    with lk.privatize(model, sgd, method=lk.DPSGD(), plan=a_plan(), clip_norm=0.5) as private:
        private.on_release(lambda release: released.update({name: block.clone() for name, block in release.blocks.items()}))
        private.backward(mixed_losses(model, batch))
        private.step()
    for name, value in expected.items():
        # float32 gradients keep 1e-7 of themselves, and pass through some layers.
        torch.testing.assert_close(released[name] * EXPECTED_BATCH_SIZE, value, rtol=1e-4, atol=1e-6)


def sketches(model: nn.Module, axis: Axis) -> dict[str, OneSided]:
    """Sketch every parameter with at least two axes."""
    made: dict[str, OneSided] = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            matrix_shape = (parameter.shape[0], parameter.numel() // parameter.shape[0])
            width = matrix_shape[0 if axis is Axis.ROWS else 1]
            basis = draw_basis(Distribution.GAUSSIAN, width, 2, ("oracle", name))
            made[name] = OneSided(name, tuple(parameter.shape), axis, basis, lk.Provenance.RANDOM)
    return made


@pytest.mark.parametrize("axis", Axis)
def test_sketched_factors_clip_and_sum_like_the_sketch_of_the_loops_gradients(axis: Axis) -> None:
    model, batch = Small(), tokens()
    chosen = sketches(model, axis)
    expected = {
        name: value if name not in chosen else torch.stack([chosen[name].encode(row)[name] for row in value])
        for name, value in looped(model, losses, batch).items()
    }
    factors = Watched(model, chosen).factors(losses, batch)
    total = ClippedSum({name: tuple(value.shape[1:]) for name, value in expected.items()}, 0.5, torch.float64, torch.device("cpu"))
    total.add(PerExample(factors, EXAMPLES))
    found = total.take()._blocks
    for name, value in clipped_sum(expected, 0.5).items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("side", ["input", "output", "smaller"])
@pytest.mark.parametrize("sketch_embeddings", [True, False])
def test_a_sketched_method_releases_the_same_however_the_batch_is_split(side: str, sketch_embeddings: bool) -> None:
    batch = tokens()["tokens"]
    ends: list[dict[str, Tensor]] = []
    for sizes in ((6,), (2, 4), (1,) * 6):
        torch.manual_seed(5)
        model = Small()
        method = lk.Grape(rank=2, refresh_every=1, side=side, sketch_embeddings=sketch_embeddings)
        sgd = functools.partial(torch.optim.SGD, lr=1.0)
        with lk.privatize(model, sgd, method=method, plan=a_plan(), clip_norm=0.5, seed=3) as private:
            for _ in range(2):
                for part in batch.split(list(sizes)):
                    private.backward(losses(model, {"tokens": part}))
                private.step()
        ends.append({name: parameter.detach() for name, parameter in model.named_parameters()})
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(ends[2], ends[0], rtol=1e-9, atol=1e-12)
