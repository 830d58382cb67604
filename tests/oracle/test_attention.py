"""Does attention, which torch computes with the batch on the second axis, give each example its own gradient?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from per_example import Watched, assert_caught
from torch import Tensor, nn

from lowkey.errors import ShapeError
from lowkey.factors import Outer

EXAMPLES, QUERIES, KEYS, FEATURES, HEADS = 5, 3, 4, 6, 2


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(21)
    yield
    torch.set_default_dtype(torch.float32)


def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = model(**batch).flatten(1)
    return (output * torch.linspace(0.5, 1.5, output.shape[1])).sum(1) + output.square().sum(1)


class Attend(nn.Module):
    """Attention from `x` to itself or to `memory`, with its outputs and its weights in the loss."""

    def __init__(self, call: dict[str, Any] | None = None, *, batch_first: bool = True, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(FEATURES, HEADS, batch_first=batch_first, **options)
        self.before = nn.Linear(FEATURES, FEATURES)
        self.call = call or {}
        self.batch_first = batch_first

    def forward(self, x: Tensor, memory: Tensor | None = None, values: Tensor | None = None, padding: Tensor | None = None) -> Tensor:
        query = self.before(x)
        key = query if memory is None else memory
        value = key if values is None else values
        if not self.batch_first:
            turned = {id(tensor): tensor.transpose(0, 1) for tensor in (query, key, value)}
            query, key, value = turned[id(query)], turned[id(key)], turned[id(value)]
        output, weights = self.attention(query, key, value, key_padding_mask=padding, **self.call)
        output = output if self.batch_first else output.transpose(0, 1)
        return output.flatten(1) if weights is None else torch.cat([output.flatten(1), weights.flatten(1)], 1)


def itself() -> dict[str, Tensor]:
    return {"x": torch.randn(EXAMPLES, QUERIES, FEATURES)}


def padding(num_keys: int) -> Tensor:
    return torch.arange(num_keys) >= torch.tensor([3, 1, 2, 3, 2])[:, None]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str
)
@pytest.mark.parametrize("call", [{}, {"need_weights": False}, {"average_attn_weights": False}], ids=str)
def test_self_attention_matches_the_loop(batch_first: bool, options: dict[str, Any], call: dict[str, Any]) -> None:
    assert_caught(Attend(call, batch_first=batch_first, **options), losses, itself())


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("separate_values", [True, False])
def test_cross_attention_matches_the_loop(need_weights: bool, separate_values: bool) -> None:
    batch = itself() | {"memory": torch.randn(EXAMPLES, KEYS, FEATURES)}
    if separate_values:
        batch["values"] = torch.randn(EXAMPLES, KEYS, FEATURES)
    assert_caught(Attend({"need_weights": need_weights}), losses, batch)


def test_separate_projections_match_the_loop() -> None:
    batch = itself() | {"memory": torch.randn(EXAMPLES, KEYS, 3), "values": torch.randn(EXAMPLES, KEYS, 7)}
    assert_caught(Attend(kdim=3, vdim=7, add_bias_kv=True), losses, batch)


CAUSAL = nn.Transformer.generate_square_subsequent_mask(QUERIES, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
@pytest.mark.parametrize("has_padding", [True, False])
@pytest.mark.parametrize(
    "mask", [None, CAUSAL, CAUSAL.isinf(), CAUSAL.isinf().expand(EXAMPLES * HEADS, -1, -1)], ids=["none", "float", "bool", "per head"]
)
def test_masked_attention_gives_torchs_outputs_and_the_loops_gradients(
    need_weights: bool, options: dict[str, Any], has_padding: bool, mask: Tensor | None
) -> None:
    model = Attend({"need_weights": need_weights, "attn_mask": mask}, **options)
    batch = itself() | ({"padding": padding(QUERIES)} if has_padding else {})
    if mask is None or mask.dim() == 2:
        assert_caught(model, losses, batch)
    torch.testing.assert_close(watched_output(model, batch), model(**batch))


def test_the_causal_hint_is_followed() -> None:
    model = Attend({"attn_mask": CAUSAL, "is_causal": True, "need_weights": False})
    batch = itself()
    assert_caught(model, losses, batch)
    torch.testing.assert_close(watched_output(model, batch), model(**batch))


def test_attention_from_learned_queries_matches_the_loop() -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries = nn.Parameter(torch.randn(1, 2, FEATURES))
            self.attention = nn.MultiheadAttention(FEATURES, HEADS, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(self.queries.expand(len(x), -1, -1), x, x, need_weights=False)[0]

    assert_caught(Learned(), losses, itself())


def test_attention_from_fixed_queries_matches_the_loop() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(FEATURES, HEADS)

        def forward(self, x: Tensor) -> Tensor:
            queries = torch.arange(2 * FEATURES).reshape(2, 1, FEATURES).sin().expand(-1, len(x), -1)
            keys = x.transpose(0, 1)
            return self.attention(queries, keys, keys, need_weights=False)[0].transpose(0, 1)

    assert_caught(Fixed(), losses, itself())


def test_frozen_projections_stay_out_of_the_gradient() -> None:
    model = Attend()
    model.attention.in_proj_weight.requires_grad_(False)
    assert_caught(model, losses, itself())


def test_packed_projection_of_self_attention_stays_a_factor() -> None:
    model = nn.MultiheadAttention(24, 2, batch_first=True)
    x = torch.randn(EXAMPLES, QUERIES, 24)
    factors = Watched(model).factors(lambda m, b: m(b["x"], b["x"], b["x"])[0].square().flatten(1).sum(1), {"x": x})
    assert isinstance(factors["in_proj_weight"], Outer)


def test_dropout_draws_torchs_own_mask() -> None:
    model = Attend({"average_attn_weights": False}, dropout=0.5)
    batch = itself()
    torch.manual_seed(3)
    expected = model(**batch)
    torch.manual_seed(3)
    torch.testing.assert_close(watched_output(model, batch), expected)


def watched_output(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Run a model under the capture."""
    with Watched(model).capture.watching():
        return model(**batch).detach()


LAYERS = [
    pytest.param(lambda **options: nn.TransformerEncoderLayer(FEATURES, HEADS, 8, 0.0, batch_first=True, **options), id="encoder"),
    pytest.param(
        lambda **options: nn.TransformerEncoderLayer(FEATURES, HEADS, 8, 0.0, "gelu", batch_first=True, norm_first=True, **options),
        id="norm first",
    ),
]


@pytest.mark.parametrize("make", LAYERS)
@pytest.mark.parametrize("training", [True, False])
def test_transformer_encoder_layer_matches_the_loop(make: Any, training: bool) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = make()

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            return self.layer(x, src_key_padding_mask=padding)

    assert_caught(Encoder().train(training), losses, itself() | {"padding": padding(QUERIES)})


def test_transformer_decoder_layer_matches_the_loop() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.TransformerDecoder(nn.TransformerDecoderLayer(FEATURES, HEADS, 8, 0.0, batch_first=True), 2)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            return self.layers(x, memory, tgt_mask=CAUSAL, tgt_is_causal=True)

    assert_caught(Decoder(), losses, itself() | {"memory": torch.randn(EXAMPLES, KEYS, FEATURES)})


def test_a_single_example_without_a_batch_axis_is_refused() -> None:
    model = nn.MultiheadAttention(FEATURES, HEADS)
    x = torch.randn(QUERIES, FEATURES)
    with pytest.raises(ShapeError, match="unsqueeze"):
        Watched(model).factors(lambda m, b: m(b["x"], b["x"], b["x"])[0].square().sum(1), {"x": x})
