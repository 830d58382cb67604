"""What cannot be trained is refused with one clear error, before anything is charged."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from audited import ADAM, PLAN, Mlp, batch_of, cross_entropy
from torch import Tensor, nn

import lowkey as lk

GIVEN: dict[str, Any] = {"optimizer": ADAM, "method": lk.DPSGD(), "plan": PLAN, "clip_norm": 1.0}


def attach(model: nn.Module, **changes: Any) -> lk.Private:
    arguments = {**GIVEN, **changes}
    return lk.privatize(model, arguments.pop("optimizer"), **arguments)


# -- losses ------------------------------------------------------------------------------------------------------------

LOSSES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a mean": (lambda losses: losses.mean(), "one loss per example"),
    "one column": (lambda losses: losses[:, None], "shape"),
    "a float": (lambda losses: 1.0, "float"),
    "detached": (lambda losses: losses.detach(), "trainable"),
    "another device": (lambda losses: losses.to("meta"), "meta"),
    "fewer than examples": (lambda losses: losses[:3], "rows"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_are_not_one_per_example_are_refused(name: str) -> None:
    change, words = LOSSES[name]
    model = Mlp()
    with attach(model) as private:
        with pytest.raises(lk.ShapeError, match=words):
            private.backward(change(cross_entropy(model, batch_of())))
        assert private.num_steps_left == PLAN.num_steps
        assert all(parameter.grad is None for parameter in model.parameters())
        private.backward(cross_entropy(model, batch_of()))
        assert private.step().step == 1


def test_a_batch_on_another_device_is_told_where_to_go() -> None:
    model = Mlp()
    with attach(model) as private:
        with pytest.raises(lk.ShapeError, match=r"the batch is on meta, and the model on cpu.*\.to\('cpu'\)"):
            model(batch_of()["x"].to("meta"))
        assert private.num_steps_left == PLAN.num_steps


def test_any_other_error_of_a_forward_pass_is_torchs_own() -> None:
    model = Mlp()
    with attach(model), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(2, 5))


def test_a_parameter_that_no_loss_reaches_is_named_before_the_first_charge() -> None:
    model = Mlp()
    model.unused = nn.Linear(3, 3)
    with attach(model) as private:
        private.backward(cross_entropy(model, batch_of()))
        with pytest.raises(lk.ConfigError, match=r"unused\.weight"):
            private.step()
        assert private.num_steps_left == PLAN.num_steps


def test_an_exhausted_plan_releases_nothing() -> None:
    plan = lk.Plan(noise_multiplier=1.0, delta=1e-3, num_examples=100, expected_batch_size=10, num_steps=2)
    model = Mlp()
    with attach(model, plan=plan) as private:
        private.step()
        private.step()
        before = [parameter.clone() for parameter in model.parameters()]
        with pytest.raises(lk.BudgetError, match="step 3"):
            private.step()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert private.history[-1][2] == 2


def test_losses_from_before_a_step_are_refused() -> None:
    model = Mlp()
    with attach(model, method=lk.Grape(rank=4, refresh_every=1)) as private:
        stale = cross_entropy(model, batch_of())
        private.step()
        # torch itself refuses them first, where a later layer's weights have moved.
        with pytest.raises((lk.PrivacyBoundaryError, RuntimeError), match=r"Run the model again|inplace operation"):
            private.backward(stale)
        assert private.step().step == 2


# -- arguments ---------------------------------------------------------------------------------------------------------

ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "clip norm 0": ({"clip_norm": 0.0}, "clip_norm"),
    "clip norm nan": ({"clip_norm": float("nan")}, "clip_norm"),
    "clip norm text": ({"clip_norm": "1"}, "clip_norm"),
    "clip norm below float32": ({"clip_norm": 1e-30}, "float32"),
    "clip norm above float32": ({"clip_norm": 1e39}, "float32"),
    "infinite clip norm with noise": ({"clip_norm": float("inf")}, "infinite"),
    "method's class": ({"method": lk.DPSGD}, "instance"),
    "noise's class": ({"noise": lk.SystemNoise}, "instance"),
    "plan's class": ({"plan": lk.Plan}, "instance"),
    "noise that is none": ({"noise": 1.0}, "a noise source"),
    "execution's class": ({"execution": lk.Execution}, "instance"),
    "execution as a dictionary": ({"execution": {"check_isolation": "never"}}, "an Execution"),
    "seed text": ({"seed": "a"}, "must be an int"),
    "a list of groups": ({"groups": [{"lr": 0.1}]}, "groups is a list"),
    "an optimizer that was built": ({"optimizer": torch.optim.SGD(Mlp().parameters(), lr=0.1)}, "optimizer is a SGD"),
    "an optimizer's name": ({"optimizer": "adam"}, "optimizer is a str"),
    "optimizer that is none": ({"optimizer": lambda tensors: None}, "torch optimizer"),
    "LBFGS": ({"optimizer": torch.optim.LBFGS}, "LBFGS"),
    "unknown name": ({"trainable": ["nobody"]}, "nobody"),
    "one name without a list": ({"trainable": "body.0.bias"}, "'body.0.bias' is not a list"),
    "tensors in place of names": ({"trainable": [torch.zeros(2)]}, r"\['Tensor'\]"),
    "nothing trainable": ({"trainable": []}, "no parameter"),
    "rank above the layer": ({"method": lk.Grape(rank=20)}, "rank"),
    "no matrix": ({"method": lk.Grape(rank=2), "trainable": ["body.0.bias"]}, "no matrix"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_cannot_mean_what_they_say_are_refused(name: str) -> None:
    changes, words = ARGUMENTS[name]
    model = Mlp()
    with pytest.raises(lk.ConfigError, match=words):
        attach(model, **changes)
    # Nothing of the attempt is left on the model.
    attach(model).close()


def test_names_may_come_from_a_generator() -> None:
    with attach(Mlp(), trainable=(name for name in ["body.0.weight"])) as private:
        assert list(private.sketches) == ["body.0.weight"]


def test_model_and_optimizer_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(lk.ConfigError, match="model is a partial"):
        lk.privatize(ADAM, Mlp(), method=lk.DPSGD(), plan=PLAN, clip_norm=1.0)


@pytest.mark.parametrize(
    "call", [lambda: lk.Execution(check_isolation="nver"), lambda: lk.SeededNoise("a")], ids=["Execution", "SeededNoise"]
)
def test_a_misspelt_choice_and_a_seed_in_words_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(lk.ConfigError, match="must be"):
        call()


def test_a_choice_may_be_given_by_its_word() -> None:
    assert lk.Execution(check_isolation="never").check_isolation is lk.CheckIsolation.NEVER


@pytest.mark.parametrize("clip_norm", [1, np.float32(1.0), torch.tensor(1.0)], ids=["int", "numpy", "tensor"])
def test_any_real_number_is_a_clip_norm(clip_norm: Any) -> None:
    with attach(Mlp(), clip_norm=clip_norm) as private:
        assert private.statement().clip_norm == 1.0


def test_a_layer_without_a_shape_is_refused() -> None:
    with pytest.raises(lk.ConfigError, match="has no shape yet"):
        attach(nn.LazyLinear(3))


def test_a_tied_weight_may_be_named_by_either_of_its_names() -> None:
    model = nn.Sequential(nn.Embedding(9, 12), nn.Linear(12, 9, bias=False))
    model[1].weight = model[0].weight
    with attach(model, trainable=["1.weight"]) as private:
        assert list(private.sketches) == ["0.weight"]


@pytest.mark.parametrize(
    "call", [lambda: attach(Mlp(), max_grad_norm=1.0), lambda: lk.Grape(rnak=4), lambda: lk.DPSGD(1)], ids=["privatize", "Grape", "DPSGD"]
)
def test_an_unknown_argument_is_a_type_error(call: Callable[[], object]) -> None:
    with pytest.raises(TypeError):
        call()


@pytest.mark.parametrize(
    "options", [{"rank": 0}, {"rank": 2.5}, {"rank": True}, {"rank": 2, "refresh_every": 0}, {"rank": 2, "side": "up"}], ids=str
)
def test_grape_refuses_options_that_mean_nothing(options: dict[str, Any]) -> None:
    with pytest.raises(lk.ConfigError):
        lk.Grape(**options)


@pytest.mark.parametrize("method", [lk.Grape, None], ids=["a class", "nothing"])
def test_what_is_no_method_is_refused_before_it_runs_without_privacy(method: Any) -> None:
    with pytest.raises(lk.ConfigError, match="is not a method"):
        lk.nonprivate.NonPrivate(method=method)


def test_a_delta_at_which_one_example_may_be_published_is_refused() -> None:
    with pytest.raises(lk.ConfigError, match="num_examples"):
        lk.Plan(noise_multiplier=1.0, delta=0.02, num_examples=100, expected_batch_size=10, num_steps=5)


def test_an_optimizer_over_other_tensors_is_refused() -> None:
    model = Mlp()
    with pytest.raises(lk.ConfigError, match=r"exactly the 8 tensors .*0 are missing, 2 are others"):
        attach(model, optimizer=lambda _: torch.optim.SGD(model.parameters(), lr=0.1))


# -- life cycle --------------------------------------------------------------------------------------------------------


def test_a_model_is_attached_once() -> None:
    model = Mlp()
    with attach(model) as private:
        with pytest.raises(lk.ConfigError, match="already private"):
            attach(model)
        private.backward(cross_entropy(model, batch_of()))
        private.step()


@pytest.mark.parametrize(
    "use", [lambda private: private.step(), lambda private: private.backward(torch.ones(2, requires_grad=True))], ids=["step", "backward"]
)
def test_a_closed_run_does_nothing(use: Callable[[lk.Private], object]) -> None:
    private = attach(Mlp())
    private.close()
    with pytest.raises(lk.PrivacyBoundaryError, match="closed"):
        use(private)


def test_an_ordinary_backward_is_refused_while_private() -> None:
    model = Mlp()
    with attach(model), pytest.raises(lk.PrivacyBoundaryError, match=r"private\.backward"):
        cross_entropy(model, batch_of()).sum().backward()


@pytest.mark.parametrize(
    ("layer", "words"),
    [(nn.BatchNorm1d(12), "BatchNorm1d"), (nn.InstanceNorm1d(12, track_running_stats=True), "track_running_stats")],
    ids=["BatchNorm", "running statistics"],
)
def test_layers_that_mix_examples_are_refused_by_name(layer: nn.Module, words: str) -> None:
    with pytest.raises(lk.UnsupportedLayerError, match=words):
        attach(nn.Sequential(layer, nn.Linear(12, 4)))


@pytest.mark.parametrize("affine", [True, False])
def test_running_statistics_do_not_move_in_a_pass_without_gradients_either(affine: bool) -> None:
    norm = nn.BatchNorm1d(12, affine=affine).eval()
    model = nn.Sequential(norm, nn.Linear(12, 4))
    with attach(model), torch.no_grad():
        model.train()
        before = norm.running_mean.clone()
        with pytest.raises(lk.UnsupportedLayerError, match="without noise"):
            model(batch_of()["x"])
        assert torch.equal(norm.running_mean, before)
        norm.eval()
        model(batch_of()["x"])


@pytest.mark.parametrize(
    "change", [lambda model: model.requires_grad_(True), lambda model: model.body.append(nn.Linear(4, 4))], ids=["unfrozen", "added"]
)
def test_a_parameter_that_joins_later_is_refused_and_keeps_no_gradient(change: Callable[[Mlp], object]) -> None:
    model = Mlp()
    with attach(model) as private:
        change(model)
        with pytest.raises(lk.ConfigError, match="when the model became private"):
            private.backward(cross_entropy(model, batch_of()))
        assert all(parameter.grad is None for parameter in model.parameters())
        assert private.num_steps_left == PLAN.num_steps


def test_a_loss_that_couples_examples_is_refused_before_anything_is_charged() -> None:
    model = Mlp()

    def contrast(inputs: Tensor) -> Tensor:
        outputs = model(inputs)
        return (outputs @ outputs.mean(0)).tanh()

    with attach(model) as private:
        with pytest.raises(lk.UnsupportedLayerError, match="mixed"):
            private.backward(contrast(batch_of()["x"]))
        assert private.num_steps_left == PLAN.num_steps


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"method": lk.Grape(rank=4)}, "method=DPSGD"),
    "optimizer": ({"optimizer": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)}, "optimizer_class=Adam"),
    "parameters": ({"trainable": ["body.0.weight", "body.0.bias"]}, "weights="),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_another_run_is_refused_by_name_before_anything_is_charged(name: str) -> None:
    changes, words = OTHERS[name]
    with attach(Mlp()) as private:
        private.backward(cross_entropy(private.model, batch_of()))
        private.step()
        state = private.state_dict()
    with attach(Mlp(), **changes) as private:
        with pytest.raises(lk.ConfigError, match=words):
            private.load_state_dict(state)
        assert private.num_steps_left == PLAN.num_steps


def test_a_checkpoint_of_another_model_is_refused_by_the_shape_that_differs() -> None:
    with attach(nn.Linear(12, 4)) as private:
        state = private.state_dict()
    with attach(nn.Linear(12, 5)) as private, pytest.raises(lk.ConfigError, match=r"'weight': \[4, 12\].*'weight': \[5, 12\]"):
        private.load_state_dict(state)


def test_a_state_that_is_no_private_state_is_refused_with_what_it_holds() -> None:
    model = Mlp()
    with attach(model) as private, pytest.raises(lk.ConfigError, match=r"frozen\.weight.*state_dict\(\)"):
        private.load_state_dict(model.state_dict())


def test_a_checkpoint_is_loaded_before_the_first_step() -> None:
    with attach(Mlp()) as private:
        state = private.state_dict()
        private.step()
        with pytest.raises(lk.ConfigError, match="before the first step"):
            private.load_state_dict(state)


def test_a_method_without_a_limit_needs_no_finite_clip_norm() -> None:
    plan = lk.Plan(noise_multiplier=0.0, delta=1e-3, num_examples=100, expected_batch_size=10, num_steps=2)
    attach(
        Mlp(), method=lk.nonprivate.NonPrivate(), plan=plan, clip_norm=float("inf"), optimizer=functools.partial(torch.optim.SGD, lr=0.1)
    ).close()
