"""Mails, spam or not: the last attention of a pretrained MiniLM, on what the layers below it made of each mail.

The layers below are frozen and public, so their output is computed once.
The last layer's attention and norms, the pooler and a new head are trained; its two wide matrices, most of its weights, stay as they are.
A BERT classifier reads nothing but its first position, so the last layer asks, answers and transforms there alone:
the same function as the whole layer, for a sixth of its work.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from tasks import Task, majority, part
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lowkey.cli.text_model import TextModel, encode, load_text_model
from lowkey.data import fit_bag_of_words, load_mails

NUM_TOKENS = 64
NUM_PUBLIC, NUM_VALIDATION = 100, 602
CACHE = Path(__file__).resolve().parent.parent / ".cache" / "experiments" / f"minilm-{NUM_TOKENS}.pt"
_BATCH = 64
_HEAD_STD = 0.02


class LastLayer(nn.Module):
    """The last layer, the pooler and the head of a BERT classifier, at its first position."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        layer = network.bert.encoder.layer[-1]
        inner = layer.attention.self
        self.num_heads = inner.num_attention_heads
        self.query, self.key, self.value = inner.query, inner.key, inner.value
        self.joined, self.joined_norm = layer.attention.output.dense, layer.attention.output.LayerNorm
        self.wide, self.narrow, self.norm = layer.intermediate.dense, layer.output.dense, layer.output.LayerNorm
        self.pooler, self.head = network.bert.pooler.dense, network.classifier

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Return two scores for each mail.

        Args:
            hidden: The input of the last layer, one row for each token.
            mask: Which tokens are there.
        """
        hidden = hidden.float()
        first = hidden[:, :1]
        query, key, value = (self._heads(rows) for rows in (self.query(first), self.key(hidden), self.value(hidden)))
        heard = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None, :].bool())
        first = self.joined_norm(first + self.joined(heard.transpose(1, 2).flatten(2)))
        first = self.norm(first + self.narrow(F.gelu(self.wide(first))))
        return self.head(torch.tanh(self.pooler(first[:, 0])))

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.unflatten(2, (self.num_heads, -1)).transpose(1, 2)


def load() -> Task:
    """Return the task; the first time, every mail goes through the frozen layers."""
    model = load_text_model(None, seed=0)
    # A copy, because the layer is shared by reference and each run trains its own.
    template = LastLayer(copy.deepcopy(model.network)).requires_grad_(True)
    for wide in (template.wide, template.narrow):
        wide.requires_grad_(False)
    train, test = _features(model)
    return Task(
        name="text",
        title="Mails, spam or not: MiniLM-L6, the last attention, the pooler and the head trained",
        public=part(train, 0, NUM_PUBLIC),
        validation=part(train, NUM_PUBLIC, NUM_PUBLIC + NUM_VALIDATION),
        train=part(train, NUM_PUBLIC + NUM_VALIDATION, len(train)),
        test=test,
        build=lambda seed: _build(template, seed),
        num_steps=40,
        batch_size=200,
        clip_norm=0.1,
        microbatch=100,
        rank=16,
        subspace_rank=50,
        learning_rates=(3e-3, 1e-2, 3e-2, 1e-1),
        baselines=_baselines,
    )


def _build(template: nn.Module, seed: int) -> nn.Module:
    model = copy.deepcopy(template)
    nn.init.normal_(model.head.weight, std=_HEAD_STD, generator=torch.Generator().manual_seed(seed))
    nn.init.zeros_(model.head.bias)
    return model.eval()


def _features(model: TextModel) -> tuple[TensorDataset, TensorDataset]:
    """Return what the last layer reads of every mail, in half precision, from the cache if it is there."""
    mails = load_mails()
    if not CACHE.exists():
        CACHE.parent.mkdir(parents=True, exist_ok=True)
        encoded = {split: encode(model.tokenizer, getattr(mails, split), num_tokens=NUM_TOKENS) for split in SPLITS}
        beside = CACHE.with_suffix(".part")
        torch.save({split: through_lower_layers(model, examples).tensors for split, examples in encoded.items()}, beside)
        beside.replace(CACHE)
    # Mapped, so that all workers share one copy.
    stored = torch.load(CACHE, mmap=True)
    train, test = (TensorDataset(*stored[split]) for split in SPLITS)
    return train, test


SPLITS = ("train", "test")


@torch.no_grad()
def through_lower_layers(model: TextModel, mails: TensorDataset) -> TensorDataset:
    """Return the input of the last layer for each mail, in half precision, beside its mask and label."""
    hidden = []
    for ids, mask in zip(*(tensor.split(_BATCH) for tensor in mails.tensors[:2]), strict=True):
        states = model.network.bert(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
        hidden.append(states[-2].half())
    return TensorDataset(torch.cat(hidden), *mails.tensors[1:])


def _baselines() -> Mapping[str, float]:
    mails = load_mails()
    labels = torch.tensor([int(mail.is_spam) for mail in mails.test])
    train = mails.train[NUM_PUBLIC + NUM_VALIDATION :]
    bag = fit_bag_of_words([mail.text for mail in train], [mail.is_spam for mail in train])
    guesses = torch.tensor([int(guess) for guess in bag.predict([mail.text for mail in mails.test])])
    return {"always the more frequent answer": majority(labels), "bag of words, not private": float((guesses == labels).float().mean())}
