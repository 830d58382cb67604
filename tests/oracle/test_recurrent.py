"""Do recurrent layers and cells give each example its own gradient, and torch's outputs?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from per_example import Watched, assert_caught
from torch import Tensor, nn
from torch.nn.utils import parametrizations, rnn

from lowkey.errors import UnsupportedLayerError

EXAMPLES, POSITIONS, INPUTS, HIDDEN = 5, 4, 3, 4


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(22)
    yield
    torch.set_default_dtype(torch.float32)


def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = model(**batch).flatten(1)
    return (output * torch.linspace(0.5, 1.5, output.shape[1])).sum(1) + output.square().sum(1)


class Recurrent(nn.Module):
    """A recurrent layer whose outputs and last states all enter the loss."""

    def __init__(self, kind: type[nn.RNNBase], first: str = "zero", **options: Any) -> None:
        super().__init__()
        self.layer = kind(INPUTS, HIDDEN, **options)
        self.before = nn.Linear(INPUTS, INPUTS)
        width = self.layer.proj_size or HIDDEN
        count = self.layer.num_layers * (2 if self.layer.bidirectional else 1)
        self.first = first
        if first == "learned":
            self.h = nn.Parameter(torch.randn(count, 1, width))
            self.c = nn.Parameter(torch.randn(count, 1, HIDDEN))
        self.count, self.width = count, width

    def start(self, x: Tensor) -> Any:
        if self.first == "zero":
            return None
        if self.first == "learned":
            h, c = self.h.expand(-1, len(x), -1).contiguous(), self.c.expand(-1, len(x), -1).contiguous()
        else:
            h = x[:, 0, :1].expand(self.count, -1, self.width).contiguous()
            c = x[:, 0, 1:2].expand(self.count, -1, HIDDEN).contiguous()
        return (h, c) if isinstance(self.layer, nn.LSTM) else h

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        output, states = self.layer(x if self.layer.batch_first else x.transpose(0, 1), self.start(x))
        output = output if self.layer.batch_first else output.transpose(0, 1)
        states = states if isinstance(states, tuple) else (states,)
        return torch.cat([output.flatten(1), *[state.transpose(0, 1).flatten(1) for state in states]], 1)


def sequence() -> dict[str, Tensor]:
    return {"x": torch.randn(EXAMPLES, POSITIONS, INPUTS)}


KINDS = [
    pytest.param(nn.LSTM, {}, id="lstm"),
    pytest.param(nn.GRU, {}, id="gru"),
    pytest.param(nn.RNN, {}, id="tanh"),
    pytest.param(nn.RNN, {"nonlinearity": "relu"}, id="relu"),
    pytest.param(nn.LSTM, {"proj_size": 2}, id="lstm with projection"),
]

SHAPES = [{}, {"num_layers": 2}, {"bidirectional": True}, {"num_layers": 2, "bidirectional": True, "bias": False}]


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("batch_first", [True, False])
def test_recurrent_layer_matches_the_loop_and_torch(
    kind: type[nn.RNNBase], options: dict[str, Any], shape: dict[str, Any], batch_first: bool
) -> None:
    model = Recurrent(kind, batch_first=batch_first, **options, **shape)
    batch = sequence()
    assert_caught(model, losses, batch)
    torch.testing.assert_close(watched_output(model, batch), model(**batch))


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("first", ["given", "learned"])
def test_first_state_passes_its_gradient_on(kind: type[nn.RNNBase], options: dict[str, Any], first: str) -> None:
    model = Recurrent(kind, first, num_layers=2, **options)
    if first == "learned" and kind is not nn.LSTM:
        del model.c
        model.c = torch.zeros(2, 1, HIDDEN)
    assert_caught(model, losses, sequence())


@pytest.mark.parametrize("frozen", ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"])
def test_frozen_weights_stay_out_of_the_gradient(frozen: str) -> None:
    model = Recurrent(nn.GRU)
    getattr(model.layer, frozen).requires_grad_(False)
    assert_caught(model, losses, sequence())


def test_parametrized_weights_match_the_loop() -> None:
    model = Recurrent(nn.GRU)
    parametrizations.weight_norm(model.layer, "weight_hh_l0")
    assert_caught(model, losses, sequence())


@pytest.mark.parametrize("batch_first", [True, False])
def test_dropout_between_layers_draws_torchs_own_mask(batch_first: bool) -> None:
    model = Recurrent(nn.GRU, num_layers=3, dropout=0.5, batch_first=batch_first)
    batch = sequence()
    torch.manual_seed(4)
    expected = model(**batch)
    torch.manual_seed(4)
    torch.testing.assert_close(watched_output(model, batch), expected)


def watched_output(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Run a model under the capture."""
    with Watched(model).capture.watching():
        return model(**batch).detach()


class Stepwise(nn.Module):
    def __init__(self, kind: type[nn.RNNCellBase], **options: Any) -> None:
        super().__init__()
        self.cell = kind(INPUTS, HIDDEN, **options)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for position in x.unbind(1):
            state = self.cell(position, state)
        return torch.cat(state, 1) if isinstance(state, tuple) else state


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("kind", "options"),
    [(nn.LSTMCell, {}), (nn.GRUCell, {}), (nn.RNNCell, {}), (nn.RNNCell, {"nonlinearity": "relu"})],
    ids=["lstm", "gru", "tanh", "relu"],
)
def test_cell_matches_the_loop_and_torch(kind: type[nn.RNNCellBase], options: dict[str, Any], bias: bool) -> None:
    model = Stepwise(kind, bias=bias, **options)
    batch = sequence()
    assert_caught(model, losses, batch)
    torch.testing.assert_close(watched_output(model, batch), model(**batch))


def test_a_packed_sequence_is_refused_with_a_way_out() -> None:
    model = nn.LSTM(INPUTS, HIDDEN, batch_first=True)

    def packed(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        sequence = rnn.pack_padded_sequence(batch["x"], torch.tensor([4, 2, 3, 1, 4]), batch_first=True, enforce_sorted=False)
        return module(sequence)[1][0].square().sum((0, 2))

    with pytest.raises(UnsupportedLayerError, match="Give the layer the padded batch"):
        Watched(model).factors(packed, sequence())
