"""What layers keep of their inputs: no more than it takes, and enough for the right gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from per_example import Watched, assert_caught, caught, distance, looped
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lowkey as lk
from lowkey.errors import UnsupportedLayerError
from lowkey.factors.inputs import ACTIVATIONS, Kept, restore
from lowkey.sketch import Identity

EXAMPLES, POSITIONS, NARROW, WIDE = 4, 5, 3, 8
IN_ORDER = sorted(ACTIVATIONS, key=lambda function: function.__name__)


class Block(nn.Module):
    """Two layers and what lies between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(NARROW, WIDE), nn.Linear(WIDE, NARROW)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x)))


def sequence() -> Tensor:
    return torch.randn(EXAMPLES, POSITIONS, NARROW, dtype=torch.float64)


def losses(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["x"]).square().sum((1, 2))


def saved_by(function: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return what a function computes and every tensor that is saved for its backward pass."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        output = function()
    return output, saved


@pytest.fixture(autouse=True)
def _identities_want_whole_inputs_as_sketches_of_outputs_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Identity, "is_identity", property(lambda _: False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", IN_ORDER, ids=lambda function: function.__name__)
def test_an_activation_saves_its_input_and_not_its_output(activation: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    x = torch.randn(5, 3, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu"):
        output, saved = saved_by(lambda: activation(x))
    assert output.dtype == dtype
    assert [tensor.data_ptr() for tensor in saved] == [x.data_ptr()]


def wide_inputs_kept_by(method: Any) -> int:
    model = Block(F.gelu).double()
    plan = lk.Plan(noise_multiplier=1.0, delta=1e-5, num_examples=100, expected_batch_size=EXAMPLES, num_steps=2)
    with lk.privatize(model, partial(torch.optim.SGD, lr=0.1), method=method, plan=plan, clip_norm=1.0) as private:
        each, saved = saved_by(lambda: losses(model, {"x": sequence()}))
        wide = {tensor.untyped_storage().data_ptr() for tensor in saved if tensor.shape == (EXAMPLES, POSITIONS, WIDE)}
        private.backward(each)
    return len(wide)


@pytest.mark.parametrize("method", [lk.RGP(rank=1), lk.LoRA(rank=1)], ids=repr)
def test_only_one_side_of_an_activation_is_kept(method: Any) -> None:
    assert wide_inputs_kept_by(method) == 1


def test_a_factor_of_the_whole_gradient_holds_the_input_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert wide_inputs_kept_by(lk.DPSGD()) == 2


def _written_afterwards(hidden: Tensor) -> Tensor:
    return F.gelu(hidden).mul_(2.0)


def _with_another_in_between(hidden: Tensor) -> Tensor:
    first = F.gelu(hidden)
    F.silu(hidden)
    return first


def _in_place(hidden: Tensor) -> Tensor:
    return F.silu(hidden * 2.0, inplace=True)


def _by_name(hidden: Tensor) -> Tensor:
    return F.gelu(input=hidden, approximate="tanh")


CASES = {
    **{function.__name__: function for function in IN_ORDER},
    "gelu by tanh": partial(F.gelu, approximate="tanh"),
    "elu with an option by place": lambda hidden: F.elu(hidden, 0.3),
    "its output is written to": _written_afterwards,
    "another activation follows": _with_another_in_between,
    "it works in place": _in_place,
    "its input is named": _by_name,
}


@pytest.mark.parametrize("between", CASES.values(), ids=CASES)
def test_gradients_behind_an_activation_are_those_of_each_example(between: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(3)
    assert_caught(Block(between).double(), losses, {"x": sequence()})


class Reusing(nn.Module):
    """A layer behind an activation of memory that is used for something else before the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(NARROW, NARROW)

    def forward(self, x: Tensor) -> Tensor:
        board = x.clone()
        output = self.layer(F.gelu(board))
        board.zero_()
        return output


def test_an_input_that_its_activation_lets_go_may_be_written_to() -> None:
    torch.manual_seed(5)
    assert_caught(Reusing().double(), losses, {"x": sequence()})


class Twice(Block):
    """Two layers behind one activation."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x))
        return self.down(hidden) + F.linear(hidden, self.down.weight * 2.0)


class Stack(nn.Module):
    """A layer and a block, whose forward pass may be run again in the backward pass."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(NARROW, NARROW), block
        self.run: Callable[..., Any] = nn.Module.__call__

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.block, self.first(x))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("kind", [Block, Twice])
def test_gradients_behind_an_activation_in_a_checkpoint_are_those_of_each_example(kind: type[Block], use_reentrant: bool) -> None:
    torch.manual_seed(4)
    model, batch = Stack(kind(F.gelu)).double(), {"x": sequence()}
    expected = looped(model, losses, batch)
    model.run = partial(checkpoint, use_reentrant=use_reentrant)
    assert distance(caught(model, losses, batch), expected) < 1e-9


def _in_parts(block: Block, x: Tensor) -> Any:
    return checkpoint(lambda x: block.down(F.gelu(block.up(x))), x, use_reentrant=False)


def test_a_checkpoint_may_run_an_activation_unseen() -> None:
    torch.manual_seed(4)
    model, batch = Stack(Block(F.gelu)).double(), {"x": sequence()}
    expected = looped(model, losses, batch)
    # The two layers are run again one by one, and what lies between them belongs to no module.
    model.run = _in_parts
    assert distance(caught(model, losses, batch), expected) < 1e-9


def test_a_source_without_its_activation_is_refused() -> None:
    saved = Kept(torch.ones(2), F.gelu).saved
    with pytest.raises(UnsupportedLayerError, match="Both runs must be the same"):
        restore(saved, None)


def test_what_an_activation_keeps_is_free_after_the_backward_pass() -> None:
    hiddens: list[weakref.ref[Tensor]] = []
    graphs: list[Tensor] = []

    def between(hidden: Tensor) -> Tensor:
        hiddens.append(weakref.ref(hidden))
        return F.gelu(hidden)

    def held(model: nn.Module, batch: Any) -> Tensor:
        graphs.append(losses(model, batch))
        return graphs[-1]

    Watched(Block(between).double()).factors(held, {"x": sequence()})
    assert [hidden() for hidden in hiddens] == [None]
