"""Find the leading directions of public gradients: the Gram matrix of PDPSGD beside Lanczos iterations over all coordinates.

    python benchmarks/subspace.py                                   # 100 public examples, 26,010 coordinates, 50 directions
    python benchmarks/subspace.py --dtype float32 --threads 1 --rounds 9
    python benchmarks/subspace.py --quick --out results.json

Lanczos sees the second moment `G^T G / m` as a product with a vector, taken by two passes over all public examples at once, with each
basis vector orthogonalised twice against those before.
One contender runs as many steps as it takes to be as near to the exact eigenspace as the Gram matrix is; another runs exactly as many
steps as there are directions, as the authors of PDP-SGD do.
The exact eigenspace is that of a singular value decomposition of gradients taken one example at a time, in float64.
Contenders take turns; printed are medians, and medians of the ratios within rounds.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine
from torch import Tensor, nn
from torch.nn import functional as F

import lowkey as lk
from lowkey.methods.method import FullGradient, Start, Strategy
from lowkey.sketch.eigen import leading_directions

DIRECTIONS, LANCZOS_ENOUGH, LANCZOS_AS_PUBLISHED = "gram", "lanczos", "lanczos-k"
TITLES = {
    DIRECTIONS: "Gram matrix (PDPSGD)",
    LANCZOS_ENOUGH: "Lanczos, to the same accuracy",
    LANCZOS_AS_PUBLISHED: "Lanczos, as many steps as directions",
}


class Digits(nn.Module):
    """The convolutional network of 26,010 weights that [zhou2021pdp] trains, with tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 8, stride=2, padding=2), nn.Conv2d(16, 32, 4, stride=2)
        self.hidden, self.head = nn.Linear(32 * 4 * 4, 32), nn.Linear(32, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = F.max_pool2d(torch.tanh(self.first(inputs)), 2, stride=1)
        inputs = F.max_pool2d(torch.tanh(self.second(inputs)), 2, stride=1)
        return self.head(torch.tanh(self.hidden(inputs.flatten(1))))


Batch = Mapping[str, Tensor]


def losses(model: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    """Return one cross-entropy per example."""
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def draw_examples(count: int) -> Batch:
    """Draw ten smooth patterns, shifted and under noise."""
    generator = torch.Generator().manual_seed(0)
    patterns = F.interpolate(torch.randn(10, 1, 7, 7, generator=generator), size=28, mode="bicubic")
    labels = torch.randint(0, 10, (count,), generator=generator)
    shifts = torch.randint(-3, 4, (count, 2), generator=generator)
    images = torch.stack([patterns[y].roll((int(dx), int(dy)), (1, 2)) for y, (dx, dy) in zip(labels, shifts, strict=True)])
    return {"x": images + 0.3 * torch.randn(images.shape, generator=generator), "y": labels}


def build(examples: Batch, dtype: torch.dtype, warm_up: int = 30) -> tuple[nn.Module, Batch]:
    """Build the network and train it a little, for gradients at a random start have a spectrum of their own."""
    torch.manual_seed(0)
    model = Digits()
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(warm_up):
        adam.zero_grad()
        losses(model, examples).mean().backward()
        adam.step()
    adam.zero_grad()
    return model.to(dtype), {"x": examples["x"].to(dtype), "y": examples["y"]}


@dataclass(frozen=True)
class Listening:
    """A method that trains nothing and hands out what every method starts from."""

    heard: list[Start] = field(default_factory=list)

    @property
    def has_guarantee(self) -> bool:
        """Whether training with it would be private."""
        return True

    def start(self, start: Start) -> Strategy:
        """Take note."""
        self.heard.append(start)
        return Strategy(sketching=FullGradient(start.specs))


def by_gram_matrix(start: Start, public: lk.Public, rank: int) -> Tensor:
    """Do what PDPSGD does at a refresh: take every public gradient, and their leading directions."""
    gradients = functools.partial(start.public_gradients, public)
    found = leading_directions(gradients, [list(start.specs)], rank)
    return torch.cat([part.flatten(1) for part in found.values()], 1)


@dataclass(frozen=True)
class Krylov:
    """What Lanczos steps leave: orthonormal vectors, and the operator between them.

    Fields:
        vectors: One for each step.
        matrix: Tridiagonal.
    """

    vectors: Tensor
    matrix: Tensor

    def directions(self, rank: int, num_steps: int) -> Tensor:
        """Return the leading Ritz vectors of the first steps."""
        ritz = torch.linalg.eigh(self.matrix[:num_steps, :num_steps])[1][:, -rank:]
        return ritz.T @ self.vectors[:num_steps]


def lanczos(model: nn.Module, examples: Batch, num_steps: int) -> Krylov:
    """Take Lanczos steps on `v -> G^T (G v)`."""
    multiply, start = _second_moment(model, examples)
    vector = torch.randn(start.numel(), generator=torch.Generator().manual_seed(1), dtype=start.dtype)
    vectors, matrix = start.new_zeros(num_steps, start.numel()), start.new_zeros(num_steps, num_steps)
    vectors[0] = vector / vector.norm()
    for step in range(num_steps):
        product = multiply(vectors[step])
        matrix[step, step] = product @ vectors[step]
        for _ in range(2):
            product = product - vectors[: step + 1].T @ (vectors[: step + 1] @ product)
        if step + 1 < num_steps:
            matrix[step, step + 1] = matrix[step + 1, step] = product.norm()
            vectors[step + 1] = product / product.norm()
    return Krylov(vectors, matrix)


def _second_moment(model: nn.Module, examples: Batch) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Return the product with the second moment, whose graph is built once and walked by every step.

    `G^T u` is linear in `u`, so its own derivative gives `G v`. Of the ways that torch offers this is the fastest here:
    `torch.func.jvp` runs the model again in every step, and `torch.func.linearize` traces it for longer than that saves.
    """
    parameters = list(model.parameters())
    each = losses(model, examples)
    weights = torch.zeros_like(each, requires_grad=True)
    pulled = torch.autograd.grad(each, parameters, weights, create_graph=True)

    def multiply(vector: Tensor) -> Tensor:
        parts = [part.view_as(p) for part, p in zip(vector.split([p.numel() for p in parameters]), parameters, strict=True)]
        (pushed,) = torch.autograd.grad(pulled, weights, parts, retain_graph=True)
        product = torch.autograd.grad(each, parameters, pushed, retain_graph=True)
        return torch.cat([part.flatten() for part in product]) / len(each)

    return multiply, torch.cat([parameter.detach().flatten() for parameter in parameters])


def exact_directions(model: nn.Module, examples: Batch, rank: int) -> Tensor:
    """Take gradients one example at a time, and decompose them, in float64."""
    exact = copy.deepcopy(model).double()
    parameters = list(exact.parameters())
    rows = [
        torch.cat([part.flatten() for part in torch.autograd.grad(losses(exact, {"x": x[None].double(), "y": y[None]}).sum(), parameters)])
        for x, y in zip(examples["x"], examples["y"], strict=True)
    ]
    return torch.linalg.svd(torch.stack(rows), full_matrices=False)[2][:rank]


def angle(found: Tensor, exact: Tensor) -> float:
    """Return the sine of the largest angle between two subspaces."""
    frame = torch.linalg.qr(found.double().T)[0].T
    return float(torch.linalg.matrix_norm(frame - (frame @ exact.T) @ exact, ord=2))


def enough_steps(krylov: Krylov, exact: Tensor, tolerance: float) -> int:
    """Return the fewest Lanczos steps that are as near to the exact eigenspace; all of them if none are."""
    rank, most = exact.shape[0], krylov.vectors.shape[0]
    return next((count for count in range(rank, most) if angle(krylov.directions(rank, count), exact) <= tolerance), most)


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Let the contenders take turns."""
    dtype = getattr(torch, options.dtype)
    model, examples = build(draw_examples(options.examples), dtype)
    # Taken first: while a model is private its operations are watched, so Lanczos has a copy.
    plain, public, listener = copy.deepcopy(model), lk.Public(examples, losses), Listening()
    exact = exact_directions(plain, examples, options.rank)
    plan = lk.Plan(noise_multiplier=1.0, delta=1e-5, num_examples=10_000, expected_batch_size=250, num_steps=1)
    with lk.privatize(model, functools.partial(torch.optim.SGD, lr=0.1), method=listener, plan=plan, clip_norm=1.0):
        gram = functools.partial(by_gram_matrix, listener.heard[0], public, options.rank)
        accuracy = angle(gram(), exact)
        steps = enough_steps(lanczos(plain, examples, options.examples + 1), exact, max(1e-6, 2 * accuracy))
        contenders: dict[str, Callable[[], Tensor]] = {
            DIRECTIONS: gram,
            LANCZOS_ENOUGH: lambda: lanczos(plain, examples, steps).directions(options.rank, steps),
            LANCZOS_AS_PUBLISHED: lambda: lanczos(plain, examples, options.rank).directions(options.rank, options.rank),
        }
        seconds = _race(contenders, options.rounds)
        angles = {name: angle(find(), exact) for name, find in contenders.items()}
    return {
        "machine": describe_machine("cpu", options.threads),
        "settings": {name: getattr(options, name) for name in ("examples", "rank", "rounds", "threads", "dtype")},
        "coordinates": sum(parameter.numel() for parameter in plain.parameters()),
        "lanczos_steps": {LANCZOS_ENOUGH: steps, LANCZOS_AS_PUBLISHED: options.rank},
        "seconds": seconds,
        "angles": angles,
        "summary": _summarise(seconds),
    }


def _race(contenders: Mapping[str, Callable[[], Tensor]], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(rounds + 1):
        shift = number % len(names)
        for name in [*names[shift:], *names[:shift]]:
            start = time.perf_counter()
            contenders[name]()
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _summarise(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    return {
        name: {
            "median_seconds": statistics.median(taken),
            "ratio": statistics.median(mine / gram for mine, gram in zip(taken, seconds[DIRECTIONS], strict=True)),
        }
        for name, taken in seconds.items()
    }


def table(result: Mapping[str, Any]) -> str:
    """Return the comparison as a Markdown table."""
    lines = ["| contender | Lanczos steps | sine of the largest angle | median time | ratio |", "|---|---|---|---|---|"]
    for name, title in TITLES.items():
        summary = result["summary"][name]
        steps, sine = result["lanczos_steps"].get(name, "none"), result["angles"][name]
        lines.append(f"| {title} | {steps} | {sine:.1e} | {1e3 * summary['median_seconds']:.1f} ms | {summary['ratio']:.2f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for."""
    options = _parse(arguments)
    if options.quick:
        options.rounds = 2
    torch.set_num_threads(options.threads)
    result = compare(options)
    settings = result["settings"]
    print(
        f"\n{settings['rank']} directions from {settings['examples']} public examples and {result['coordinates']:,} coordinates, "
        f"{settings['dtype']}, {settings['threads']} thread(s), {settings['rounds']} rounds\n\n{table(result)}\n"
    )
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=100, help="public examples")
    parser.add_argument("--rank", type=int, default=50, help="directions")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--out", type=Path, help="a JSON file for every sample")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
