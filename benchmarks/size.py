"""Train a model whose ordinary training would not fit: one private step of an OPT-1.3B-shaped model in float32.

    python benchmarks/size.py                                  # batches of 1, 2, 4 and 8 × 128 tokens; about 9 GB
    python benchmarks/size.py --batches 1 --out results.json
    python benchmarks/size.py --layers 2 --width 64 --heads 2 --vocabulary 100      # any smaller shape

Weights are random; embeddings are frozen, and the language model's head is tied to them.
The private step is measured. What AdamW would need is computed: weights, gradients and two moments by their number,
activations as the bytes that autograd keeps in a real forward pass.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import memory
import torch
from machine import describe_machine
from measuring import MEMORY_ENVIRONMENT
from torch import Tensor, nn
from torch.nn import functional as F

import lowkey as lk

FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of an OPT-shaped decoder."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    tokens: int

    def build(self) -> nn.Module:
        """Build it without torch's own initialisation, which would draw every weight twice."""
        from transformers import OPTConfig, OPTForCausalLM

        config = OPTConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            word_embed_proj_dim=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            ffn_dim=4 * self.width,
            max_position_embeddings=max(2048, self.tokens),
            dropout=0.0,
            attention_dropout=0.0,
            use_cache=False,
        )
        with torch.device("meta"):
            model = OPTForCausalLM(config)
        model.to_empty(device="cpu")
        model.tie_weights()
        _fill(model)
        decoder = model.model.decoder
        decoder.embed_tokens.requires_grad_(False)
        decoder.embed_positions.requires_grad_(False)
        return model.train()


@torch.no_grad()
def _fill(model: nn.Module) -> None:
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.uniform_(-0.03, 0.03)
        else:
            parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)


def losses(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return each example's mean loss over its next tokens."""
    logits: Tensor = model(input_ids=tokens).logits[:, :-1]
    by_token = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return by_token.view(len(tokens), -1).mean(1)


def kept_bytes(model: nn.Module, tokens: Tensor) -> int:
    """Return how many bytes of activations ordinary training keeps for its backward pass."""
    owned = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage.nbytes()
        # Detached: an operation that saved its own output with its graph would hold itself, and every activation behind it, for good.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        total = losses(model, tokens).mean()
    assert total.requires_grad  # the graph, and with it every storage counted above, is alive until here
    return sum(kept.values())


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """One batch size; bytes and seconds.

    Fields:
        examples: The batch size; it is taken in microbatches of `microbatch`.
        microbatch: Examples of one backward pass.
        seconds: Clock time of the second private step.
        cpu_seconds: Its processor time.
        first_peak: Resident peak of the process over the first step, which checks that examples are apart where it can.
        peak: Resident peak of the process over the second step.
        model: Resident before anything was attached.
        adamw_state: Computed: weights, gradients and two moments of ordinary training.
        adamw_activations: What autograd keeps in an ordinary forward pass over one microbatch; gradients add up over microbatches.
    """

    examples: int
    microbatch: int
    seconds: float
    cpu_seconds: float
    first_peak: int
    peak: int
    model: int
    adamw_state: int
    adamw_activations: int

    @property
    def adamw(self) -> int:
        """What ordinary training would hold."""
        return self.adamw_state + self.adamw_activations


def measure(model: nn.Module, shape: Shape, examples: int, microbatch: int, rank: int) -> Sizes:
    """Take two private steps on batches of `examples`."""
    tokens = torch.randint(0, shape.vocabulary, (examples, shape.tokens), generator=torch.Generator().manual_seed(1))
    held, size = memory.resident_bytes(), min(microbatch, examples)
    activations = kept_bytes(model, tokens[:size])
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    weights = sum(parameter.numel() for parameter in model.parameters())
    plan = lk.Plan(noise_multiplier=1.0, delta=1e-6, num_examples=10_000, expected_batch_size=examples, num_steps=10)
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-4)
    memory.reset_peak()
    peaks: list[int] = []
    with lk.privatize(model, optimizer, method=lk.Grape(rank=rank), plan=plan, clip_norm=1.0) as private:
        for _ in range(2):
            clock, cpu = time.perf_counter(), time.process_time()
            for part in tokens.split(microbatch):
                private.backward(losses(model, part))
            private.step()
            clock, cpu = time.perf_counter() - clock, time.process_time() - cpu
            peaks.append(memory.peak_bytes())
            memory.reset_peak()
    return Sizes(
        examples=examples,
        microbatch=size,
        seconds=clock,
        cpu_seconds=cpu,
        first_peak=peaks[0],
        peak=peaks[1],
        model=held,
        adamw_state=FLOAT_BYTES * (weights + 3 * trained),
        adamw_activations=activations,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the batch sizes that the command line asks for, the smallest first."""
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    shape = Shape(layers=options.layers, width=options.width, heads=options.heads, vocabulary=options.vocabulary, tokens=options.tokens)
    model = shape.build()
    count = sum(parameter.numel() for parameter in model.parameters())
    result: dict[str, Any] = {
        "machine": describe_machine("cpu", options.threads),
        "shape": asdict(shape),
        "parameters": count,
        "rank": options.rank,
    }
    result["trained"] = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    result["batches"] = []
    print(f"{count / 1e9:.2f} billion parameters, {result['trained'] / 1e9:.2f} billion trained, Grape(rank={options.rank})\n")
    print("| batch | time of a step | processor time | peak of the process | peak of the first step | AdamW, computed | ratio |")
    print("|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    for examples in sorted(options.batches):
        sizes = measure(model, shape, examples, options.microbatch, options.rank)
        print(_row(sizes, shape), flush=True)
        result["batches"].append({**asdict(sizes), "adamw": sizes.adamw})
        if options.out:
            options.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def _row(sizes: Sizes, shape: Shape) -> str:
    peak = max(sizes.first_peak, sizes.peak)
    cells = [f"{sizes.examples} × {shape.tokens}", f"{sizes.seconds:.1f} s", f"{sizes.cpu_seconds:.1f} s"]
    cells += [f"{held / 1e9:.2f} GB" for held in (sizes.peak, sizes.first_peak, sizes.adamw)]
    return "| " + " | ".join([*cells, f"{peak / sizes.adamw:.2f}"]) + " |"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--microbatch", type=int, default=2, help="examples of one backward pass")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=50272)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, help="a JSON file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    if MEMORY_ENVIRONMENT.items() - os.environ.items():
        # The allocator reads its threshold once, when a process starts.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MEMORY_ENVIRONMENT})
    raise SystemExit(main())
