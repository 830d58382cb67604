"""LSTM, GRU and plain recurrent layers and cells, unrolled into linear layers that have rules of their own.

The product with the inputs is one linear layer over all positions; the product with the state is one linear layer per position,
whose factors the collector strings together.

    Axes: B examples, T positions, I inputs, H hidden features, G gates
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowkey.errors import UnsupportedLayerError
from lowkey.factors.capture import Capture
from lowkey.factors.elementwise import as_data, per_example
from lowkey.factors.registry import Call, Operation, rule

State = Sequence[Tensor]
"""The hidden state `(B, H)`, and for an LSTM the cell state."""

Cell = Callable[[Tensor, Tensor, State], State]
"""Maps (gates of the input, gates of the state, state) to the next state."""


def _lstm_cell(inputs: Tensor, recurrent: Tensor, state: State) -> State:
    enter, forget, new, leave = (inputs + recurrent).chunk(4, -1)
    cell = torch.sigmoid(forget) * state[1] + torch.sigmoid(enter) * torch.tanh(new)
    return torch.sigmoid(leave) * torch.tanh(cell), cell


def _gru_cell(inputs: Tensor, recurrent: Tensor, state: State) -> State:
    reset_in, update_in, new_in = inputs.chunk(3, -1)
    reset_state, update_state, new_state = recurrent.chunk(3, -1)
    new = torch.tanh(new_in + torch.sigmoid(reset_in + reset_state) * new_state)
    return (new + torch.sigmoid(update_in + update_state) * (state[0] - new),)


def _tanh_cell(inputs: Tensor, recurrent: Tensor, state: State) -> State:
    return (torch.tanh(inputs + recurrent),)


def _relu_cell(inputs: Tensor, recurrent: Tensor, state: State) -> State:
    return (torch.relu(inputs + recurrent),)


@dataclass(frozen=True)
class _Weights:
    """One direction of one layer."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None = None
    b_hh: Tensor | None = None
    w_hr: Tensor | None = None


@dataclass
class _Given:
    """The arguments of `torch.lstm` and its kin, in torch's order."""

    input: Tensor
    hx: Any
    flat_weights: Sequence[Tensor]
    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool

    def directions(self, num_states: int) -> list[_Weights]:
        """Return the weights of every layer, forward before backward."""
        count = self.num_layers * (2 if self.bidirectional else 1)
        size = len(self.flat_weights) // count
        groups = [list(self.flat_weights[i * size : (i + 1) * size]) for i in range(count)]
        if self.has_biases:
            return [_Weights(*group) for group in groups]
        return [_Weights(*group[:2], w_hr=group[2] if size > 2 and num_states == 2 else None) for group in groups]


_CELLS: dict[Operation, Cell] = {
    torch.lstm: _lstm_cell,
    torch.gru: _gru_cell,
    torch.rnn_tanh: _tanh_cell,
    torch.rnn_relu: _relu_cell,
}

_SINGLE: dict[Operation, Cell] = {
    torch.lstm_cell: _lstm_cell,
    torch.gru_cell: _gru_cell,
    torch.rnn_tanh_cell: _tanh_cell,
    torch.rnn_relu_cell: _relu_cell,
}


@rule(*_CELLS)
def recurrent(call: Call) -> Any:
    """`torch.lstm(input, hx, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first)`, and GRU and RNN."""
    if len(call.args) > 1 and isinstance(call.args[1], Tensor) and not call.args[1].is_floating_point():
        raise UnsupportedLayerError(
            "a recurrent layer was given a PackedSequence, which sorts and interleaves the examples, so its rows cannot be told apart. "
            "Each example must keep its place on the batch axis. "
            "Give the layer the padded batch, and read each example's output at its own last position."
        )
    given = _Given(*call.args, **call.kwargs)
    cell = _CELLS[call.function]
    hidden = given.hx if isinstance(given.hx, tuple | list) else (given.hx,)
    # The operations below meet the same capture that called this rule.
    with call.capture:
        inputs = given.input if given.batch_first else given.input.transpose(0, 1)
        firsts = [[states[layer] for states in hidden] for layer in range(len(hidden[0]))]
    batch = inputs.shape[0]
    inputs = as_data(call.capture, inputs, batch)
    states = [[as_data(call.capture, state, batch) for state in first] for first in firsts]
    directions = [_bias_by_row(call.capture, weights, batch) for weights in given.directions(len(hidden))]
    with call.capture:
        output, lasts = _stack(given, directions, cell, inputs, states)
        final = [torch.stack(parts) for parts in zip(*lasts, strict=True)]
        return (output if given.batch_first else output.transpose(0, 1), *final)


def _stack(
    given: _Given, directions: Sequence[_Weights], cell: Cell, inputs: Tensor, states: Sequence[State]
) -> tuple[Tensor, list[State]]:
    """Run every layer on `(B, T, I)`; return the last one's output and each direction's last state."""
    ways = 2 if given.bidirectional else 1
    lasts: list[State] = []
    for layer in range(given.num_layers):
        if layer and given.dropout and given.train:
            inputs = _dropout(inputs, given.dropout)
        outputs: list[Tensor] = []
        for way in range(ways):
            output, last = _scan(cell, directions[layer * ways + way], inputs, states[layer * ways + way], backwards=way == 1)
            outputs.append(output)
            lasts.append(last)
        inputs = torch.cat(outputs, -1) if ways == 2 else outputs[0]
    return inputs, lasts


def _dropout(inputs: Tensor, rate: float) -> Tensor:
    # torch draws the mask with the positions first; the same order gives the same mask from the same seed.
    return F.dropout(inputs.transpose(0, 1).contiguous(), rate).transpose(0, 1)


def _scan(cell: Cell, weights: _Weights, inputs: Tensor, state: State, *, backwards: bool) -> tuple[Tensor, State]:
    """Run one direction of one layer; return its outputs `(B, T, H)` and its last state."""
    gates = F.linear(inputs, weights.w_ih, weights.b_ih).unbind(1)
    outputs: list[Tensor] = []
    for gates_in in reversed(gates) if backwards else gates:
        state = _step(cell, weights, gates_in, state)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs, 1), state


def _step(cell: Cell, weights: _Weights, gates_in: Tensor, state: State) -> State:
    gates_state = F.linear(state[0], weights.w_hh)
    following = cell(gates_in, gates_state if weights.b_hh is None else gates_state + weights.b_hh, state)
    return following if weights.w_hr is None else (F.linear(following[0], weights.w_hr), *following[1:])


def _bias_by_row(capture: Capture, weights: _Weights, num_rows: int) -> _Weights:
    """Hold the state's bias once per example, so that its gradient is recorded once and not at every position."""
    bias = weights.b_hh
    return weights if bias is None or not capture.is_weight(bias) else replace(weights, b_hh=per_example(capture, bias, num_rows, 2))


@rule(*_SINGLE)
def single_step(call: Call) -> Any:
    """`torch.lstm_cell(input, hx, w_ih, w_hh, b_ih, b_hh)`, and GRU and RNN."""
    inputs, hx = call.args[:2]
    hidden = tuple(hx) if isinstance(hx, tuple | list) else (hx,)
    batch = inputs.shape[0]
    inputs = as_data(call.capture, inputs, batch)
    state = [as_data(call.capture, part, batch) for part in hidden]
    weights = _bias_by_row(call.capture, _Weights(*call.args[2:], **call.kwargs), batch)
    with call.capture:
        following = _step(_SINGLE[call.function], weights, F.linear(inputs, weights.w_ih, weights.b_ih), state)
    return tuple(following) if len(following) > 1 else following[0]
