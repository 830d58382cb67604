"""Is everything refused by name that couples examples, hides them, or would publish private data without noise?"""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from unseen import Scaled

import lowkey as lk
from lowkey.factors import isolation

EXAMPLES, FEATURES = 6, 4

Losses = Callable[[nn.Module, Tensor], Tensor]


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().flatten(1).sum(1)


def attach(model: nn.Module, **options: Any) -> lk.Private:
    plan = lk.Plan(noise_multiplier=0.0, delta=1e-5, num_examples=100, expected_batch_size=10, num_steps=5)
    return lk.privatize(model, functools.partial(torch.optim.SGD, lr=0.1), method=lk.DPSGD(), plan=plan, clip_norm=1.0, **options)


def backward(model: nn.Module, x: Tensor, losses: Losses = squares) -> None:
    with attach(model) as private:
        private.backward(losses(model, x))


def rows() -> Tensor:
    return torch.randn(EXAMPLES, FEATURES, generator=torch.Generator().manual_seed(1))


class Apply(nn.Module):
    """A linear layer between two functions of (module, input), with a buffer to misuse."""

    def __init__(self, before: Callable[[Any, Tensor], Tensor] | None = None, after: Callable[[Any, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)
        self.scale = nn.Parameter(torch.ones(FEATURES))
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.before, self.after = before, after

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.before is None else self.before(self, x)
        x = self.layer(x) * self.scale
        return x if self.after is None else self.after(self, x)


# -- examples that touch each other ------------------------------------------------------------------------------------


def test_batch_norm_is_refused_by_name_before_anything_is_spent() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4))
    with pytest.raises(lk.UnsupportedLayerError, match="'1' is BatchNorm1d, which mixes examples"):
        attach(model)


def test_batch_norm_that_wakes_up_later_is_refused() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4).eval())
    with attach(model) as private:
        private.backward(squares(model, rows()))
        model.train()
        with pytest.raises(lk.UnsupportedLayerError, match="mixes examples"):
            model(rows())


def contrastive(model: nn.Module, x: Tensor) -> Tensor:
    left, right = F.normalize(model(x)), F.normalize(model(x.roll(1, 1)))
    return F.cross_entropy(left @ right.T, torch.arange(len(x)), reduction="none")


def balanced(model: nn.Module, x: Tensor) -> Tensor:
    gates = model(x).softmax(-1)
    return gates.square().sum(1) + gates.mean(0).square().sum()


def centred(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model(x)
    return (hidden - hidden.mean(0)).square().sum(1)


@pytest.mark.parametrize("losses", [contrastive, balanced, centred])
def test_a_loss_that_mixes_examples_is_refused(losses: Losses) -> None:
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES))
    with pytest.raises(lk.UnsupportedLayerError, match="examples are mixed"):
        backward(model, rows(), losses)


@pytest.mark.parametrize("positions", [EXAMPLES, 2 * EXAMPLES, EXAMPLES + 1, 1])
def test_positions_on_the_first_axis_are_refused(positions: int) -> None:
    model = nn.TransformerEncoderLayer(FEATURES, 2, 8, 0.0)
    x = torch.randn(positions, EXAMPLES, FEATURES)
    with pytest.raises((lk.ShapeError, lk.UnsupportedLayerError), match=r"[Ff]irst axis"):
        backward(model, x, lambda m, value: m(value).square().sum((0, 2)))


@pytest.mark.parametrize("examples", [2, 3, 6, 40])
def test_a_layer_that_sees_the_examples_in_another_order_is_refused(examples: int) -> None:
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES))

    def sorted_inside(module: nn.Module, x: Tensor) -> Tensor:
        order = torch.arange(len(x)).flip(0)
        return module[2](module[0](x).tanh()[order])[order.argsort()].square().sum(1)

    with pytest.raises(lk.UnsupportedLayerError, match="examples are mixed"):
        backward(model, torch.randn(examples, FEATURES, generator=torch.Generator().manual_seed(7)), sorted_inside)


def test_the_check_waits_for_gradients_that_are_still_zero() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES))
    nn.init.zeros_(model[1].weight)

    def mixing(module: nn.Module, x: Tensor) -> Tensor:
        hidden = module[0](x)
        return module[1](hidden - hidden.mean(0).where(module[1].weight.detach().any(), hidden)).sum(1) + module[1](x).sum(1)

    with attach(model) as private:
        private.backward(mixing(model, rows()))
        private.step()
        with pytest.raises(lk.UnsupportedLayerError, match="examples are mixed"):
            private.backward(mixing(model, rows()))


def test_the_check_waits_for_parameters_that_no_loss_has_reached_yet() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES))
    with attach(model) as private:
        private.backward(model[0](rows()).square().sum(1))
        with pytest.raises(lk.UnsupportedLayerError, match="examples are mixed"):
            private.backward(centred(model, rows()))


@pytest.mark.parametrize("kept", [EXAMPLES // 2, EXAMPLES // 3])
def test_losses_of_a_part_of_the_examples_are_refused_after_the_first_batch_too(kept: int) -> None:
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES))
    with attach(model) as private:
        private.backward(squares(model, rows()))
        private.step()
        with pytest.raises(lk.ShapeError, match="each example that the model runs on needs its loss"):
            private.backward(squares(model, rows())[:kept])


def test_positions_that_a_layer_folds_into_rows_may_change_in_number() -> None:
    def folded(module: nn.Module, x: Tensor) -> Tensor:
        start, positions = module[0](x[:, 0]), module[0](x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return (start + positions.sum(1)).square().sum(1)

    model = nn.Sequential(nn.Linear(FEATURES, FEATURES))
    with attach(model) as private:
        for positions in (1, 3, 2):
            private.backward(folded(model, torch.ones(EXAMPLES, positions, FEATURES)))
            private.step()
        assert private.num_steps_left == 2


@pytest.mark.parametrize("scale", [1e4, 1e6, 1e12])
@pytest.mark.parametrize("activation", [nn.Tanh, nn.Sigmoid])
def test_inputs_that_saturate_a_network_are_not_taken_for_coupling(activation: type[nn.Module], scale: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), activation(), nn.Linear(FEATURES, FEATURES))
    # Of the first row, every unit is saturated, so that its gradient is zero beside inputs that are huge.
    backward(model, scale * rows())


def test_a_zero_gradient_beside_huge_inputs_shows_nothing_yet() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES))

    def centred_inside(module: nn.Module, x: Tensor) -> Tensor:
        hidden = module[0](x).tanh()
        return module[2](hidden - hidden.mean(0)).square().sum(1)

    with attach(model) as private:
        private.backward(squares(model, 1e6 * rows()))
        private.step()
        with pytest.raises(lk.UnsupportedLayerError, match=r"'0\.weight'.*examples are mixed"):
            private.backward(centred_inside(model, rows()))


def test_an_operation_that_mixes_examples_inside_itself_is_refused() -> None:
    model = Apply(after=lambda m, x: torch.einsum("bi,i,ci->bi", x, m.scale, x))
    with pytest.raises(lk.UnsupportedLayerError, match="another result alone than in its batch"):
        backward(model, rows())


SHARED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "matrix": lambda m, x: F.linear(x, x.T @ x, m.scale),
    "bias": lambda m, x: F.linear(x, m.layer.weight, x.mean(0)),
    "kernel": lambda m, x: F.conv1d(x[:, :, None], (x.T @ x)[:, :, None], m.scale)[..., 0],
    "bias of a kernel": lambda m, x: F.conv1d(x[:, :, None], m.layer.weight[:, :, None], x.mean(0))[..., 0],
    "scale of a layer norm": lambda m, x: F.layer_norm(x, (FEATURES,), x.mean(0), m.scale),
    "shift of a layer norm": lambda m, x: F.layer_norm(x, (FEATURES,), m.scale, x.mean(0)),
    "scale of a group norm": lambda m, x: F.group_norm(x, 2, x.mean(0), m.scale),
}


@pytest.mark.parametrize("name", SHARED)
def test_a_weight_that_is_computed_from_the_batch_is_refused_beside_a_trained_one(name: str) -> None:
    with pytest.raises(lk.UnsupportedLayerError, match="computed from the batch"):
        backward(Apply(after=SHARED[name]), rows())


def test_a_weight_without_gradient_beside_a_trained_one_is_a_constant() -> None:
    matrix = torch.eye(FEATURES) * 3
    backward(Apply(after=lambda m, x: F.linear(x, matrix, m.scale)), rows())


def test_a_layer_that_runs_on_no_row_of_a_batch_is_refused() -> None:
    with pytest.raises(lk.ShapeError, match="used on 0 rows while 6 losses"):
        backward(Apply(after=lambda m, x: x + m.layer(x[:0]).sum()), rows())


# -- data that would leave without noise -------------------------------------------------------------------------------


def _setitem(m: Any, x: Tensor) -> Tensor:
    m.mean[:] = x.detach().mean(0)
    return x


def _augmented(m: Any, x: Tensor) -> Tensor:
    m.mean += x.detach().mean(0)
    return x


def _method(m: Any, x: Tensor) -> Tensor:
    m.mean.mul_(0.9).add_(x.detach().mean(0))
    return x


def _through_a_view(m: Any, x: Tensor) -> Tensor:
    m.mean[:2].copy_(x.detach()[0, :2])
    return x


def _through_data(m: Any, x: Tensor) -> Tensor:
    m.mean.data.copy_(x.detach()[0])
    return x


def _as_output(m: Any, x: Tensor) -> Tensor:
    torch.mean(x.detach(), 0, out=m.mean)
    return x


def _replaced(m: Any, x: Tensor) -> Tensor:
    m.mean = 0.9 * m.mean + 0.1 * x.detach().mean(0)
    return x


def _into_a_weight(m: Any, x: Tensor) -> Tensor:
    m.scale.data.copy_(x.detach()[0])
    return x


@pytest.mark.parametrize("leak", [_setitem, _augmented, _method, _through_a_view, _through_data, _as_output, _replaced, _into_a_weight])
@pytest.mark.parametrize("place", ["before", "after"])
def test_a_tensor_of_the_model_that_takes_private_data_is_refused(leak: Callable[[Any, Tensor], Tensor], place: str) -> None:
    with pytest.raises(lk.UnsupportedLayerError, match="would publish private data without noise"):
        backward(Apply(**{place: leak}), rows())


def test_a_buffer_that_counts_passes_is_allowed() -> None:
    def count(m: Any, x: Tensor) -> Tensor:
        m.mean += 1
        m.mean = m.mean * 2
        return x + m.mean

    backward(Apply(before=count), rows())


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_table_that_the_batch_rescales_is_refused(is_trained: bool) -> None:
    model = nn.Sequential(nn.Embedding(9, FEATURES, max_norm=1.0), nn.Linear(FEATURES, 2))
    model[0].requires_grad_(is_trained)
    with pytest.raises(lk.UnsupportedLayerError, match="max_norm"):
        backward(model, torch.randint(0, 9, (EXAMPLES, 3)))


# -- gradients that cannot be seen -------------------------------------------------------------------------------------


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@pytest.mark.parametrize(
    "use", [lambda m, x: Scaled.apply(x, m.scale), lambda m, x: x * Rounded.apply(m.scale)], ids=["with data", "alone"]
)
def test_a_weight_inside_a_custom_function_is_refused_and_leaves_no_raw_gradient(use: Callable[[Any, Tensor], Tensor]) -> None:
    model = Apply(after=use)
    with pytest.raises(lk.UnsupportedLayerError, match=r"'scale' was used where lowkey cannot see it"):
        backward(model, rows())
    assert model.scale.grad is None


def test_a_weight_used_outside_the_model_is_refused() -> None:
    model = Apply()
    with pytest.raises(lk.UnsupportedLayerError, match="was used where lowkey cannot see it"):
        backward(model, rows(), lambda m, x: m(x).square().sum(1) + m.scale.square().sum())


def test_data_written_into_a_derived_weight_is_refused() -> None:
    def write(m: Any, x: Tensor) -> Tensor:
        mixed = m.scale * torch.ones(EXAMPLES, 1)
        mixed.add_(x)
        return mixed

    with pytest.raises(lk.UnsupportedLayerError, match="writes data into a tensor that was computed from weights alone"):
        backward(Apply(after=write), rows())


@pytest.mark.parametrize(
    "losses",
    [lambda m, x: m(x).square().sum(), lambda m, x: m(x), lambda m, x: m(x).detach().sum(1)],
    ids=["summed", "per feature", "detached"],
)
def test_losses_that_are_not_one_per_example_are_refused(losses: Losses) -> None:
    with pytest.raises(lk.ShapeError):
        backward(Apply(), rows(), losses)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_compiled_model_is_refused() -> None:
    with pytest.raises(lk.UnsupportedLayerError, match=r"torch\.compile"):
        attach(torch.compile(nn.Linear(FEATURES, 2)))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda model: torch.jit.trace(model, rows())], ids=["script", "trace"])
def test_a_model_of_torch_jit_is_refused(make: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(lk.UnsupportedLayerError, match=r"torch\.jit"):
        attach(make(nn.Linear(FEATURES, 2)))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_frozen_part_of_torch_jit_is_a_function_of_the_data() -> None:
    frozen = torch.jit.script(nn.Linear(FEATURES, 3).requires_grad_(False))
    backward(nn.Sequential(frozen, nn.Linear(3, 2)), rows())


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", r"ignore:The \.grad attribute:UserWarning")
def test_a_private_model_is_no_part_of_a_whole_compiled_graph() -> None:
    model = nn.Linear(FEATURES, 2)
    with attach(model), pytest.raises(RuntimeError, match="cannot be part of a compiled graph"):
        torch.compile(model, backend="eager", fullgraph=True)(rows())


def test_a_backward_pass_outside_private_is_refused() -> None:
    model = Apply()
    with attach(model), pytest.raises(lk.PrivacyBoundaryError, match=r"outside private\.backward"):
        squares(model, rows()).sum().backward()


@pytest.mark.parametrize("part", [lambda m: m, lambda m: m.layer, lambda m: nn.Sequential(m)], ids=["itself", "a part", "a whole"])
def test_a_model_is_attached_once(part: Callable[[Any], nn.Module]) -> None:
    model = Apply()
    with attach(model), pytest.raises(lk.ConfigError, match="already private"):
        attach(part(model))
    backward(model, rows())


# -- the model stays itself --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_copy_of_a_private_model_runs_on_its_own_weights(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(FEATURES, 3), nn.Tanh(), nn.Linear(3, 2))
    with attach(model) as private:
        twin = duplicate(model)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        assert not twin(rows()).any()
        twin(rows()).sum().backward()
        assert twin[0].weight.grad is not None
        private.backward(squares(model, rows()))
    attach(twin).close()


def test_names_and_outputs_stay_and_close_gives_the_model_back() -> None:
    model = nn.Sequential(nn.Embedding(9, FEATURES), nn.LSTM(FEATURES, 3, batch_first=True))
    names, modules = list(model.state_dict()), [type(module) for module in model.modules()]
    with attach(model):
        assert list(model.state_dict()) == names
        assert [type(module) for module in model.modules()] == modules
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_evaluation_passes_through_untouched() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, 3), nn.Dropout(), nn.LayerNorm(3))
    expected = model.eval()(rows())
    with attach(model):
        with torch.no_grad():
            assert torch.equal(model(rows()), expected)
        with torch.inference_mode():
            assert torch.equal(model(rows()), expected)
        assert torch.equal(model(rows()), expected)


def test_rounding_that_never_repeats_is_not_taken_for_coupling(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = isolation.isolation_weights(torch.zeros(4))
    plain = [("weight", torch.full((4,), 1.0)), ("key.bias", torch.full((4,), 1e-9))]
    weighted = [("weight", weights.square()), ("key.bias", 3e-9 * weights.square())]
    with pytest.raises(lk.UnsupportedLayerError, match=r"key\.bias"):
        isolation.check_isolation(weights, weighted, plain)
    # An accelerator's sums are not ordered; there, what is zero but for rounding may differ by any factor.
    monkeypatch.setattr(isolation, "_ORDERED", isolation._UNORDERED)
    assert isolation.check_isolation(weights, weighted, plain) == {"weight", "key.bias"}


def test_coupling_is_seen_above_the_rounding_of_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "_ORDERED", isolation._UNORDERED)
    weights = isolation.isolation_weights(torch.zeros(4))
    plain = [("weight", torch.ones(4)), ("router", torch.full((4,), 1e-3))]
    weighted = [("weight", weights.square()), ("router", 1.1e-3 * weights.square())]
    with pytest.raises(lk.UnsupportedLayerError, match="router"):
        isolation.check_isolation(weights, weighted, plain)
