"""Does the capture keep examples, constants and weights apart where a model makes it hard?"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from per_example import Watched, assert_caught, caught, distance, looped
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointError, checkpoint

EXAMPLES, POSITIONS, FEATURES = 4, 4, 3


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(25)
    yield
    torch.set_default_dtype(torch.float32)


def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = model(**batch).flatten(1)
    return (output * torch.linspace(0.5, 1.5, output.shape[1])).sum(1) + output.square().sum(1)


def sequence() -> dict[str, Tensor]:
    return {"x": torch.randn(EXAMPLES, POSITIONS, FEATURES)}


class Apply(nn.Module):
    """A layer, a table of positions, and a function of (module, input) that uses them."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)
        self.where = nn.Embedding(POSITIONS, FEATURES)
        self.scale = nn.Parameter(torch.randn(FEATURES))
        self.function = function
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def _written_through_a_view(m: Any, x: Tensor) -> Tensor:
    board = torch.zeros(EXAMPLES, POSITIONS, FEATURES)
    board[: len(x), 1:].copy_(x[:, 1:])
    return m.layer(board[: len(x)]) * m.scale


def _written_by_index(m: Any, x: Tensor) -> Tensor:
    board = torch.zeros(len(x), POSITIONS, FEATURES)
    board[:, 0] = m.layer(x[:, 0])
    board[:, 1:] += x[:, 1:]
    return m.layer(board) + m.scale


def _written_as_output(m: Any, x: Tensor) -> Tensor:
    board = torch.empty(0)
    torch.mul(x, 2.0, out=board)
    return m.layer(board)


def _written_through_data(m: Any, x: Tensor) -> Tensor:
    board = torch.zeros(len(x), POSITIONS, FEATURES)
    view = board.data
    view.add_(x)
    return m.layer(board)


def _without_grad_halfway(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = m.layer(x) * m.scale
        half = m.scale * 0.5
    return m.layer(x * half) * m.scale - target


def _detached(m: Any, x: Tensor) -> Tensor:
    hidden = m.layer(x)
    return hidden * m.scale.detach() + (hidden * m.scale).detach() + m.scale.data * m.layer.weight.detach().sum()


def _data_through_a_function(m: Any, x: Tensor) -> Tensor:
    return m.layer(Doubled.apply(m.layer(x))) * m.scale


def _positions_made_from_the_input(m: Any, x: Tensor) -> Tensor:
    positions = x.new_ones(POSITIONS).cumsum(0).long() - 1
    return m.layer(x + m.where(positions))


def _positions_like_the_input(m: Any, x: Tensor) -> Tensor:
    return m.layer(x + m.where(torch.zeros_like(x[..., 0], dtype=torch.long)))


def _positions_of_the_batch(m: Any, x: Tensor) -> Tensor:
    return m.layer(x + m.where(torch.arange(POSITIONS).expand(len(x), -1)))


def _two_branches(m: Any, x: Tensor) -> Tensor:
    m.layer(x)
    return m.layer(x) + m.where.weight


def _rows_folded(m: Any, x: Tensor) -> Tensor:
    folded = m.layer(x.flatten(0, 1)) * m.scale
    return folded.unflatten(0, (len(x), POSITIONS))


def _checkpointed_use_of_its_own_weight(m: Any, x: Tensor) -> Tensor:
    return checkpoint(m.layer, x + m.scale, use_reentrant=False)


FUNCTIONS = [
    _written_through_a_view,
    _written_by_index,
    _written_as_output,
    _written_through_data,
    _without_grad_halfway,
    _detached,
    _data_through_a_function,
    _positions_made_from_the_input,
    _positions_like_the_input,
    _positions_of_the_batch,
    _two_branches,
    _rows_folded,
    _checkpointed_use_of_its_own_weight,
]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_a_model_does_around_its_weights_leaves_their_gradients_right(function: Callable[[Any, Tensor], Tensor]) -> None:
    assert_caught(Apply(function), losses, sequence())


def _keep_positions(m: Any, x: Tensor) -> Tensor:
    if m.cache is None:
        m.cache = torch.arange(POSITIONS)
    return m.layer(x) + m.where(m.cache)


def test_positions_kept_from_an_earlier_pass_are_still_no_examples() -> None:
    model = Apply(_keep_positions)
    watched = Watched(model)
    watched.factors(losses, sequence())
    batch = sequence()
    found = {name: factor.dense() for name, factor in watched.factors(losses, batch).items()}
    expected = looped(model, losses, batch)
    assert distance(found, {name: expected[name] for name in found}) < 1e-9


def test_constants_end_with_the_tensors_that_they_describe() -> None:
    watched = Watched(Apply(_positions_of_the_batch))
    for _ in range(3):
        watched.factors(losses, sequence())
    assert len(watched.capture._known) == 0


def test_positions_left_by_a_failed_pass_do_no_harm() -> None:
    model = Apply(_positions_of_the_batch)
    watched = Watched(model)
    with pytest.raises(RuntimeError), watched.capture.watching():
        model(torch.randn(EXAMPLES, POSITIONS, FEATURES + 1))
    assert not watched.capture.is_watching
    batch = sequence()
    expected = looped(model, losses, batch)
    found = {name: factor.dense() for name, factor in watched.factors(losses, batch).items()}
    assert distance(found, {name: expected[name] for name in found}) < 1e-9


def test_another_thread_is_not_watched() -> None:
    model = Apply(_two_branches)
    watched = Watched(model)
    seen: list[bool] = []
    with watched.capture.watching():
        thread = threading.Thread(target=lambda: seen.append(watched.capture.is_watching))
        thread.start()
        thread.join()
    assert seen == [False]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_positions_in_a_checkpoint_are_no_examples(use_reentrant: bool) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Apply(_positions_of_the_batch)

        def forward(self, x: Tensor) -> Tensor:
            return (
                x @ torch.arange(9.0).reshape(FEATURES, FEATURES)
                + F.linear(torch.eye(FEATURES)[None, :1], self.inner.layer.weight)
                + self.inner(x)
            )

    class Outer(nn.Module):
        use_reentrant = False

        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(FEATURES, FEATURES)
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, self.first(x), use_reentrant=self.use_reentrant)

    model, batch = Outer(), sequence()
    expected = looped(model, losses, batch)
    model.use_reentrant = use_reentrant
    assert distance(caught(model, losses, batch), expected) < 1e-9


class Inner(nn.Module):
    """A layer and weights of its own, in a function that may be compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)
        self.scale = nn.Parameter(torch.randn(FEATURES))
        self.function: Callable[[Tensor], Tensor] = self._run

    def _run(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(self.layer(x), self.layer.weight)) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) + x


# The compiler looks into the shape checks that tests load lowkey with, and at tensors in ways that torch itself warns of.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", r"ignore:The \.grad attribute:UserWarning")
@pytest.mark.parametrize("is_warm", [True, False])
@pytest.mark.parametrize("place", ["around", "inside"])
def test_a_compiled_function_around_or_inside_a_model_leaves_its_gradients_right(place: str, is_warm: bool) -> None:
    torch.compiler.reset()
    model, batch = Inner(), sequence()
    expected = looped(model, losses, batch)
    compiled = torch.compile(losses if place == "around" else model.function, backend="eager")
    if place == "inside":
        model.function = compiled
    if is_warm:
        (compiled(model, batch) if place == "around" else compiled(batch["x"])).sum().backward()
        model.zero_grad()
    assert distance(caught(model, compiled if place == "around" else losses, batch), expected) < 1e-9


def test_a_frozen_model_around_one_weight_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.LSTM(5, FEATURES, batch_first=True))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "1.bias_hh_l0")

    def first(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return module(batch["x"])[0].square().sum((1, 2))

    batch = sequence()
    assert distance(caught(model, first, batch), looped(model, first, batch)) < 1e-9


@pytest.mark.parametrize(
    "use", [lambda m, x: F.linear(x, m.layer.weight, m.scale), lambda m, x: x @ m.layer.weight], ids=["linear", "matmul"]
)
def test_a_checkpointed_function_does_not_take_inputs_for_weights(use: Callable[[Any, Tensor], Tensor]) -> None:
    model = Apply(lambda m, x: checkpoint(lambda y: use(m, y.tanh()).tanh(), m.layer(x), use_reentrant=False))
    # As many examples as features, so that a weight and an input have one shape.
    batch = {"x": torch.randn(FEATURES, FEATURES)}
    with pytest.raises(CheckpointError, match=r"[Rr]ecomput"):
        caught(model, losses, batch)
