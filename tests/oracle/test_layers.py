"""Does the capture give every layer the gradients that a loop over examples gives?

float64 throughout; the tolerance of 1e-9 leaves six digits for sums taken in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from per_example import Watched, assert_caught, caught, distance, looped
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from transformers.pytorch_utils import Conv1D

EXAMPLES, POSITIONS, FEATURES, VOCABULARY = 5, 4, 6, 11


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(20)
    yield
    torch.set_default_dtype(torch.float32)


def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """One loss per example that gives every output a gradient of its own."""
    output = model(**batch).flatten(1)
    return (output * torch.linspace(0.5, 1.5, output.shape[1])).sum(1) + output.square().sum(1)


def rows() -> Tensor:
    return torch.randn(EXAMPLES, FEATURES)


def sequence() -> Tensor:
    return torch.randn(EXAMPLES, POSITIONS, FEATURES)


def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (EXAMPLES, POSITIONS))


def series() -> Tensor:
    return torch.randn(EXAMPLES, 4, 9)


def image() -> Tensor:
    return torch.randn(EXAMPLES, 4, 7, 6)


def volume() -> Tensor:
    return torch.randn(EXAMPLES, 2, 4, 5, 4)


def distances() -> Tensor:
    return torch.arange(POSITIONS)[:, None] - torch.arange(POSITIONS) + 3


class Apply(nn.Module):
    """A function of (parameters by name, input)."""

    def __init__(self, function: Callable[..., Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class ModelDefinedRMSNorm(nn.Module):
    def __init__(self, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES))
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        return (self.offset + self.weight) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Bag(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, FEATURES, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.bag(x)


def randomly(module: nn.Module) -> nn.Module:
    """Give norms and biases, which start at one and zero, values of their own."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(FEATURES, 3), rows),
    "linear without bias": (lambda: nn.Linear(FEATURES, 3, bias=False), rows),
    "linear over positions": (lambda: nn.Linear(FEATURES, 30), sequence),
    "linear over a grid": (lambda: nn.Linear(6, 3), image),
    "wide linear, few positions": (lambda: nn.Linear(FEATURES, 64), sequence),
    "Conv1D of transformers": (lambda: Conv1D(8, FEATURES), sequence),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3), series),
    "conv1d, strided, dilated": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2), series),
    "conv1d, same": (lambda: nn.Conv1d(4, 6, 4, padding="same"), series),
    "conv1d, circular": (lambda: nn.Conv1d(4, 6, 3, padding=1, padding_mode="circular"), series),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3), image),
    "conv2d, strided, padded": (lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), bias=False), image),
    "conv2d, dilated": (lambda: nn.Conv2d(4, 6, 2, dilation=(2, 3), padding="valid"), image),
    "conv2d, grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding="same"), image),
    "conv2d, depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, stride=2), image),
    "conv2d, reflecting": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), image),
    "conv2d, wide": (lambda: nn.Conv2d(4, 40, 5), image),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, stride=(1, 2, 1), padding=1, dilation=(1, 1, 2)), volume),
    "conv3d, grouped": (lambda: nn.Conv3d(2, 4, 2, groups=2), volume),
    "conv after conv": (lambda: nn.Sequential(nn.Conv2d(4, 5, 3), nn.ReLU(), nn.Conv2d(5, 3, 2)), image),
    "embedding": (lambda: nn.Embedding(VOCABULARY, FEATURES), tokens),
    "embedding with padding": (lambda: nn.Embedding(VOCABULARY, FEATURES, padding_idx=-1), tokens),
    "embedding of one token each": (lambda: nn.Embedding(VOCABULARY, FEATURES), lambda: tokens()[:, 0]),
    "embedding, sparse": (lambda: nn.Embedding(VOCABULARY, FEATURES, sparse=True), tokens),
    "embedding of a grid": (lambda: nn.Embedding(VOCABULARY, FEATURES), lambda: torch.randint(0, VOCABULARY, (EXAMPLES, 2, 3))),
    "indexed table": (lambda: Apply(lambda m, x: m.table[x], table=(VOCABULARY, FEATURES)), tokens),
    "indexed table from its end": (lambda: Apply(lambda m, x: m.table[x - VOCABULARY], table=(VOCABULARY, FEATURES)), tokens),
    "indexed vector": (lambda: Apply(lambda m, x: m.table[x], table=(VOCABULARY,)), tokens),
    "index_select": (lambda: Apply(lambda m, x: m.table.index_select(0, x[:, 0]), table=(VOCABULARY, 3)), tokens),
    "layer norm": (lambda: randomly(nn.LayerNorm(FEATURES)), sequence),
    "layer norm over two axes": (lambda: randomly(nn.LayerNorm((POSITIONS, FEATURES))), sequence),
    "layer norm of rows": (lambda: randomly(nn.LayerNorm(FEATURES, bias=False)), rows),
    "rms norm": (lambda: randomly(nn.RMSNorm(FEATURES)), sequence),
    "rms norm over two axes": (lambda: randomly(nn.RMSNorm((POSITIONS, FEATURES))), sequence),
    "rms norm of a model": (lambda: ModelDefinedRMSNorm(0.0), sequence),
    "rms norm of a model, around one": (lambda: ModelDefinedRMSNorm(1.0), sequence),
    "group norm": (lambda: randomly(nn.GroupNorm(2, 4)), image),
    "group norm of rows": (lambda: randomly(nn.GroupNorm(3, FEATURES)), rows),
    "instance norm": (lambda: randomly(nn.InstanceNorm2d(4, affine=True)), image),
    "instance norm 1d": (lambda: randomly(nn.InstanceNorm1d(4, affine=True)), series),
    "batch norm, frozen": (lambda: randomly(nn.BatchNorm2d(4)).eval(), image),
    "bias": (lambda: Apply(lambda m, x: x + m.bias, bias=(FEATURES,)), sequence),
    "bias in place": (lambda: Apply(lambda m, x: (x * 2).add_(m.bias), bias=(FEATURES,)), sequence),
    "scale": (lambda: Apply(lambda m, x: m.scale * x, scale=(FEATURES,)), sequence),
    "scalar temperature": (lambda: Apply(lambda m, x: x * m.t.exp(), t=()), sequence),
    "scale of positions": (lambda: Apply(lambda m, x: x * m.scale[:, None], scale=(POSITIONS,)), sequence),
    "class token": (lambda: Apply(lambda m, x: torch.cat([m.token.expand(len(x), -1, -1), x], 1), token=(1, 1, FEATURES)), sequence),
    "class token, repeated": (
        lambda: Apply(lambda m, x: torch.cat([x, m.token.repeat(len(x), 1, 1)], dim=1), token=(1, 1, FEATURES)),
        sequence,
    ),
    "class token, tiled": (lambda: Apply(lambda m, x: torch.cat([m.token.tile(len(x), 1, 1), x], 1), token=(1, 1, FEATURES)), sequence),
    "class token, expanded like": (lambda: Apply(lambda m, x: m.token.expand_as(x) + x, token=(1, 1, FEATURES)), sequence),
    "prompt": (lambda: Apply(lambda m, x: torch.cat([m.prompt[None].expand(len(x), -1, -1), x], 1), prompt=(3, FEATURES)), sequence),
    "position embedding": (lambda: Apply(lambda m, x: x + m.where, where=(1, POSITIONS, FEATURES)), sequence),
    "position embedding, cut": (lambda: Apply(lambda m, x: x + m.where[: x.shape[1]], where=(9, FEATURES)), sequence),
    "mask token": (lambda: Apply(lambda m, x: torch.where(x > 0, x, m.token), token=(FEATURES,)), sequence),
    "mask token by masking": (lambda: Apply(lambda m, x: x * (x > 0) + m.token * (x <= 0), token=(FEATURES,)), sequence),
    "prelu": (lambda: nn.PReLU(), sequence),
    "prelu per channel": (lambda: nn.PReLU(POSITIONS), sequence),
    "bilinear": (lambda: Apply(lambda m, x: F.bilinear(x, x.tanh(), m.w, m.b), w=(3, FEATURES, FEATURES), b=(3,)), rows),
    "einsum": (lambda: Apply(lambda m, x: torch.einsum("bti,ho,hij->btj", x, m.u, m.w), u=(2, 3), w=(2, FEATURES, 3)), sequence),
    "matmul": (lambda: Apply(lambda m, x: x @ m.w, w=(FEATURES, 3)), sequence),
    "matmul from the left": (lambda: Apply(lambda m, x: m.w @ x, w=(3, POSITIONS)), sequence),
    "matmul with the transpose": (lambda: Apply(lambda m, x: torch.matmul(x, m.w.transpose(0, 1)), w=(3, FEATURES)), sequence),
    "matmul of rows": (lambda: Apply(lambda m, x: torch.mm(x, m.w.t()), w=(3, FEATURES)), rows),
    "product with a vector": (lambda: Apply(lambda m, x: x @ m.w, w=(FEATURES,)), sequence),
    "batched matmul": (lambda: Apply(lambda m, x: torch.matmul(x[:, None], m.w), w=(3, FEATURES, 2)), sequence),
    "addmm": (lambda: Apply(lambda m, x: torch.addmm(m.b, x, m.w), b=(3,), w=(FEATURES, 3)), rows),
    "addmm, scaled": (lambda: Apply(lambda m, x: torch.addmm(m.b, x, m.w, beta=0.5, alpha=2.0), b=(3,), w=(FEATURES, 3)), rows),
    "transposed convolution": (lambda: nn.ConvTranspose2d(4, 3, 3, stride=2), image),
    "bag of embeddings": (lambda: Bag(mode="mean"), tokens),
    "bag of embeddings, greatest": (lambda: Bag(mode="max"), tokens),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(FEATURES, 3)), sequence),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(FEATURES, FEATURES)), rows),
    "low-rank weight": (lambda: Apply(lambda m, x: F.linear(x, m.b @ m.a), a=(2, FEATURES), b=(3, 2)), sequence),
    "weight in two halves": (
        lambda: Apply(lambda m, x: F.linear(x, m.w.chunk(2)[0]) * F.linear(x, m.w.chunk(2)[1]), w=(6, FEATURES)),
        sequence,
    ),
    "weight masked in place": (lambda: Apply(lambda m, x: F.linear(x, _masked(m.w)), w=(3, FEATURES)), sequence),
    "weight masked through a view": (lambda: Apply(lambda m, x: F.linear(x, _masked_view(m.w)), w=(3, FEATURES)), sequence),
    "weight written into zeros": (lambda: Apply(lambda m, x: F.linear(x, _embedded(m.w)), w=(2, FEATURES)), sequence),
    "straight-through weight": (lambda: Apply(lambda m, x: F.linear(x, m.w + (m.w.round() - m.w).detach()), w=(3, FEATURES)), sequence),
    "stacked weights": (lambda: Apply(lambda m, x: F.linear(x, torch.stack([m.a, m.b])), a=(FEATURES,), b=(FEATURES,)), sequence),
    "residual of the weight": (lambda: Apply(lambda m, x: x @ (torch.eye(FEATURES) + m.w), w=(FEATURES, FEATURES)), sequence),
    "cast to the input": (lambda: Apply(lambda m, x: F.linear(x, m.w.to(x)) + m.b.type_as(x), w=(3, FEATURES), b=(3,)), sequence),
    "distances": (lambda: Apply(lambda m, x: torch.cdist(x, m.centre[None]), centre=(3, FEATURES)), sequence),
    "relative positions": (
        lambda: Apply(lambda m, x: x @ x.mT + F.embedding(distances(), m.w)[..., 0], w=(7, 1)),
        sequence,
    ),
    "constant expanded to the batch": (
        lambda: Apply(lambda m, x: x + F.linear(torch.ones(1, 1, 2).expand(len(x), -1, -1), m.w), w=(FEATURES, 2)),
        sequence,
    ),
}  # fmt: skip


def _masked(weight: Tensor) -> Tensor:
    copy = weight.clone()
    copy[0] = 0.0
    return copy


def _masked_view(weight: Tensor) -> Tensor:
    copy = weight.clone()
    copy[1:].mul_(3.0)
    return copy


def _embedded(weight: Tensor) -> Tensor:
    larger = torch.zeros(4, FEATURES)
    larger[1:3] = weight
    return larger


# torch warns that it pads a copy; so does the loop's run, and nothing depends on it.
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("name", LAYERS)
def test_layer_matches_the_loop(name: str) -> None:
    make, inputs = LAYERS[name]
    assert_caught(make(), losses, {next(_argument(make())): inputs()})


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("name", LAYERS)
def test_layer_between_linear_layers_passes_gradients_on(name: str) -> None:
    make, inputs = LAYERS[name]
    x = inputs()
    if not x.is_floating_point():
        pytest.skip("indices have no gradient")
    model = nn.Sequential(nn.Linear(x.shape[-1], x.shape[-1]), make(), nn.Linear(make()(x).shape[-1], 2))
    assert_caught(model, losses, {"input": x})


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("name", LAYERS)
def test_layer_gives_no_row_for_no_example(name: str) -> None:
    make, inputs = LAYERS[name]
    model = make()
    expected = model(inputs()[:1])
    found = Watched(model).output(inputs()[:0])
    assert found.shape == (0, *expected.shape[1:])


def _argument(module: nn.Module) -> Iterator[str]:
    names = [name for name in module.forward.__code__.co_varnames if name != "self"]
    return iter(names)


@pytest.mark.parametrize("name", ["linear over positions", "conv2d", "embedding", "layer norm", "group norm", "einsum", "class token"])
def test_layer_matches_the_loop_for_a_single_example(name: str) -> None:
    make, inputs = LAYERS[name]
    assert_caught(make(), losses, {next(_argument(make())): inputs()[:1]})


def test_two_inputs_of_a_bilinear_layer() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Bilinear(FEATURES, 3, 2)

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return self.layer(left, right)

    assert_caught(Pair(), losses, {"left": rows(), "right": torch.randn(EXAMPLES, 3)})


class Tied(nn.Module):
    """A table that embeds tokens and scores them, and a layer that is used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, FEATURES)
        self.layer = nn.Linear(FEATURES, FEATURES)
        self.scores = nn.Linear(FEATURES, VOCABULARY, bias=False)
        self.scores.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.table(x)
        for _ in range(3):
            hidden = torch.tanh(self.layer(hidden))
        return self.scores(hidden) + F.linear(hidden, self.table.weight * 2)


def test_uses_of_one_weight_are_summed_before_the_norm() -> None:
    assert_caught(Tied(), losses, {"x": tokens()})


def test_a_frozen_part_changes_nothing_else() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.LayerNorm(5), nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    model[3].weight.requires_grad_(False)
    model[4].bias.requires_grad_(False)
    assert_caught(model, losses, {"input": sequence()})


def test_an_input_that_asks_for_a_gradient_gets_the_plain_one() -> None:
    x = rows().requires_grad_()
    model = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 2))
    (expected,) = torch.autograd.grad(losses(model, {"input": x}).sum(), x)
    caught(model, losses, {"input": x})
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(FEATURES, 3)
        self.right = nn.Linear(FEATURES, 3)
        self.unused = nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x[:, :1] > 0, self.left(x), self.right(x))


def test_a_parameter_that_an_example_does_not_use_gets_zero_from_it() -> None:
    batch = {"x": torch.linspace(-1, 1, EXAMPLES)[:, None] + torch.zeros(FEATURES)}
    found = caught(Branches(), losses, batch)
    on_the_left = batch["x"][:, 0] > 0
    assert not found["left.weight"][~on_the_left].any()
    assert found["left.weight"][on_the_left].any()
    assert not found["unused.weight"].any()


def test_bfloat16_autocast_gives_the_loops_gradients_up_to_its_rounding() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 16), nn.PReLU(), nn.Linear(16, 3)).float()
    batch = {"input": sequence().float()}

    def under_autocast(module: nn.Module, given: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output = module(given["input"])
        return output.float().square().flatten(1).sum(1)

    expected = looped(model, under_autocast, batch)
    # bfloat16 keeps 8 bits: 2^-8 per operation, and the loop's matrix products round in another order.
    assert distance(caught(model, under_autocast, batch), expected) < 0.03
