"""What is trained: a model, one batch, and where gradients start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from resnet import SmallResNet
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Materials:
    """A built workload: the model on its device, and one batch."""

    model: nn.Module
    inputs: Tensor
    labels: Tensor
    first: nn.Module

    def logits(self, model: nn.Module | None = None) -> Tensor:
        """Run the model, or a wrapped form of it."""
        out: Any = (model or self.model)(self.inputs)
        return out if isinstance(out, Tensor) else out.logits


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and a batch, by name.

    Fields:
        name: How the command line calls it.
        title: How tables call it.
        steps_per_turn: Steps between two changes of contender; more where a step is short.
        build: Makes the model, the input and the labels, and names the module in front of the first trained one.
    """

    name: str
    title: str
    steps_per_turn: int
    build: Callable[[], tuple[nn.Module, Tensor, Tensor, nn.Module]]

    def materials(self, device: str) -> Materials:
        """Build it, the same on each call."""
        torch.manual_seed(0)
        model, inputs, labels, first = self.build()
        return Materials(model=model.train().to(device), inputs=inputs.to(device), labels=labels.to(device), first=first)


@dataclass(frozen=True, kw_only=True)
class EncoderShape:
    """The sizes of a BERT-shaped encoder and of its batch."""

    layers: int
    width: int
    heads: int
    examples: int
    tokens: int
    vocabulary: int = 30522

    def build(self) -> tuple[nn.Module, Tensor, Tensor, nn.Module]:
        """Build it from its configuration, with random weights, embeddings frozen, and no dropout."""
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=4 * self.width,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=2,
        )
        model = BertForSequenceClassification(config)
        model.bert.embeddings.requires_grad_(False)
        tokens = torch.randint(0, self.vocabulary, (self.examples, self.tokens))
        return model, tokens, torch.randint(0, 2, (self.examples,)), model.bert.embeddings


def _resnet(name: str, widths: tuple[int, ...], examples: int, steps_per_turn: int = 1) -> Workload:
    def build() -> tuple[nn.Module, Tensor, Tensor, nn.Module]:
        model = SmallResNet(widths)
        return model, torch.randn(examples, 3, 32, 32), torch.randint(0, 10, (examples,)), model.stem

    title = f"residual network with GroupNorm, blocks of {', '.join(map(str, widths))} channels, batch {examples} × 3 × 32 × 32"
    return Workload(name=name, title=title, steps_per_turn=steps_per_turn, build=build)


def _encoder(name: str, shape: EncoderShape, steps_per_turn: int = 1) -> Workload:
    title = f"BERT-shaped encoder, {shape.layers} × {shape.width}, batch {shape.examples} × {shape.tokens} tokens, embeddings frozen"
    return Workload(name=name, title=title, steps_per_turn=steps_per_turn, build=shape.build)


WORKLOADS = {
    workload.name: workload
    for workload in [
        _encoder("encoder", EncoderShape(layers=6, width=384, heads=12, examples=32, tokens=128)),
        _resnet("resnet", (32, 64, 128), 64, steps_per_turn=2),
        _resnet("resnet-wide", (64, 128, 256), 64),
        _encoder("encoder-large", EncoderShape(layers=24, width=1024, heads=16, examples=16, tokens=256)),
        _encoder("encoder-tiny", EncoderShape(layers=1, width=32, heads=2, examples=4, tokens=8, vocabulary=100)),
        _resnet("resnet-tiny", (24,), 2),
    ]
}
