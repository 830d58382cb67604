"""Do whole models of the transformers library give the gradients that a loop over examples gives, checkpointed or not?

The models are random, tiny and in float64. What some of them compute in float32 (masks, rotary angles) comes out the same in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
import transformers
from per_example import Watched, assert_caught, caught, distance, looped
from torch import Tensor, nn
from torch.nn import functional as F

import lowkey as lk
from lowkey.errors import UnsupportedLayerError

EXAMPLES, POSITIONS, VOCABULARY = 4, 7, 50

Batch = dict[str, Tensor]


@pytest.fixture(autouse=True)
def quietly_in_double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(23)
    transformers.logging.set_verbosity_error()
    yield
    torch.set_default_dtype(torch.float32)


def losses(model: Any, batch: Batch) -> Tensor:
    """Cross-entropy of a label, or of an example's own tokens, averaged over them."""
    given = {key: value for key, value in batch.items() if key != "labels"}
    logits = model(**given).logits
    if logits.dim() == 2:
        return F.cross_entropy(logits, batch["labels"], reduction="none")
    tokens = given.get("decoder_input_ids", given.get("input_ids"))
    return F.cross_entropy(logits.transpose(1, 2), tokens, reduction="none").mean(1)


def ids(examples: int, positions: int) -> Tensor:
    return torch.randint(2, VOCABULARY, (examples, positions))


def masked(examples: int, positions: int) -> Batch:
    mask = torch.ones(examples, positions, dtype=torch.long)
    mask[-1, positions - 2 :] = 0
    return {"input_ids": ids(examples, positions), "attention_mask": mask}


def labelled(examples: int, positions: int) -> Batch:
    return masked(examples, positions) | {"labels": torch.randint(0, 2, (examples,))}


def plain(examples: int, positions: int) -> Batch:
    return {"input_ids": ids(examples, positions)}


def paired(examples: int, positions: int) -> Batch:
    return masked(examples, positions) | {"decoder_input_ids": ids(examples, positions - 2)}


def pictures(examples: int, positions: int) -> Batch:
    return {"pixel_values": torch.randn(examples, 3, 8, 8), "labels": torch.randint(0, 2, (examples,))}


ENCODER = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 20,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def bert() -> nn.Module:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**ENCODER, classifier_dropout=0.0))


def roberta() -> nn.Module:
    return transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**ENCODER, classifier_dropout=0.0))


def distilbert() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 20}
    config = transformers.DistilBertConfig(**sizes, dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0)
    return transformers.DistilBertForSequenceClassification(config)


def gpt2() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 20}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def opt() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 24}
    config = transformers.OPTConfig(**sizes, max_position_embeddings=20, word_embed_proj_dim=16, dropout=0.0, attention_dropout=0.0)
    return transformers.OPTForCausalLM(config)


def llama() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=1, max_position_embeddings=20, tie_word_embeddings=True)
    return transformers.LlamaForCausalLM(config)


def t5() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, dropout_rate=0.0))


def vit() -> nn.Module:
    sizes = {key: value for key, value in ENCODER.items() if key not in ("vocab_size", "max_position_embeddings")}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=8, patch_size=4))


Make = Callable[[], Any]
Draw = Callable[[int, int], Batch]

MODELS: dict[str, tuple[Make, Draw]] = {
    "bert": (bert, labelled),
    "roberta": (roberta, labelled),
    "distilbert": (distilbert, labelled),
    "gpt2": (gpt2, plain),
    "opt": (opt, masked),
    "llama": (llama, plain),
    "t5": (t5, paired),
    "vit": (vit, pictures),
}


def in_double(make: Make) -> Any:
    """Build a model whose norms and biases have left their first values."""
    model = make().double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("name", MODELS)
def test_model_matches_the_loop(name: str) -> None:
    make, draw = MODELS[name]
    assert_caught(in_double(make), losses, draw(EXAMPLES, POSITIONS))


@pytest.mark.parametrize("name", [name for name in MODELS if name != "vit"])
@pytest.mark.parametrize(
    "shape", [(POSITIONS, POSITIONS), (1, POSITIONS), (2 * POSITIONS, POSITIONS)], ids=["as many", "one", "twice as many"]
)
def test_positions_are_never_taken_for_examples(name: str, shape: tuple[int, int]) -> None:
    make, draw = MODELS[name]
    assert_caught(in_double(make), losses, draw(*shape))


@pytest.mark.parametrize("name", MODELS)
def test_batches_of_changing_size_run_through_one_attachment(name: str) -> None:
    make, draw = MODELS[name]
    model = in_double(make)
    watched = Watched(model)
    batches = [draw(examples, POSITIONS) for examples in (3, POSITIONS, 1, 2)]
    found = [watched.factors(losses, batch) for batch in batches]
    for factors, batch in zip(found, batches, strict=True):
        expected = looped(model, losses, batch)
        assert distance({key: factors[key].dense() for key in expected}, expected) < 1e-9


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sizes", [(EXAMPLES,), (1, EXAMPLES - 1), (1,) * EXAMPLES], ids=str)
def test_weights_move_by_the_clipped_sum_of_the_loop_however_the_batch_is_split(name: str, sizes: tuple[int, ...]) -> None:
    make, draw = MODELS[name]
    model, batch = in_double(make), draw(EXAMPLES, POSITIONS)
    gradients = looped(model, losses, batch)
    norms = torch.stack([value.flatten(1).square().sum(1) for value in gradients.values()]).sum(0).sqrt()
    clip_norm = float(norms.median())  # so that some examples are clipped and others are not
    before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    plan = lk.Plan(noise_multiplier=0.0, delta=1e-3, num_examples=100, expected_batch_size=10, num_steps=1)
    with lk.privatize(model, partial(torch.optim.SGD, lr=1.0), method=lk.DPSGD(), plan=plan, clip_norm=clip_norm) as private:
        for first, size in zip(accumulate((0, *sizes[:-1])), sizes, strict=True):
            private.backward(losses(model, {key: value[first : first + size] for key, value in batch.items()}))
        private.step()
    moved = {key: (before[key] - parameter.detach()) * 10 for key, parameter in model.named_parameters()}
    weights = (clip_norm / norms).clamp(max=1.0)
    assert distance(moved, {key: torch.einsum("b,b...->...", weights, value) for key, value in gradients.items()}) < 1e-9


# The method has two names in version 5, and only the older one takes use_reentrant.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("name", "use_reentrant"), [(name, way) for name in MODELS for way in (True, False) if (name, way) != ("t5", True)]
)
def test_checkpointed_model_matches_the_loop(name: str, use_reentrant: bool) -> None:
    make, draw = MODELS[name]
    model = in_double(make)
    batch = draw(EXAMPLES, POSITIONS)
    expected = looped(model, losses, batch)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert distance(caught(model, losses, batch), expected) < 1e-9


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_position_biases_that_leave_a_reentrant_checkpoint_are_refused_with_a_way_out() -> None:
    model = in_double(t5)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(UnsupportedLayerError, match="use_reentrant=False"):
        caught(model, losses, paired(EXAMPLES, POSITIONS))


def test_tied_head_is_one_coordinate_with_both_its_uses() -> None:
    model = in_double(gpt2)
    found = caught(model, losses, plain(EXAMPLES, POSITIONS))
    assert "lm_head.weight" not in found
    assert found["transformer.wte.weight"].abs().sum() > 0
