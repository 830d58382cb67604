"""Measure what denoising costs, beside a decomposition of one layer and beside a training step, and how often it takes noise for a signal.

    python benchmarks/denoise.py                                   # a layer of 1024 x 4096, and a BERT-shaped encoder of 6 x 384
    python benchmarks/denoise.py --quick                           # a first impression
    python benchmarks/denoise.py --parts layer --rows 4096 --cols 4096 --device cuda

Matrices are noise, or noise with a few singular values that stand out of it, as those of a private run.
Contenders take turns; a ratio is the median over rounds of the ratio within a round.
Prints tables, and with --out writes every sample as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from contenders import CONTENDERS
from machine import describe_machine
from torch import Tensor
from workloads import WORKLOADS

from lowkey.refine import bulk_edge, shrink, shrink_all, shrunk_values

SPIKES = (4.0, 2.5, 1.5)
"""Singular values of the signal, in units of the smallest that can be seen."""

SHAPES = ((2, 384), (10, 64), (64, 64), (384, 384))
KAPPAS = (1.01, 1.02, 1.05, 1.1)

Run = Callable[[], object]
Samples = dict[str, dict[str, list[float]]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for."""
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    result: dict[str, Any] = {"machine": describe_machine(options.device, options.threads), "spikes": SPIKES, "rounds": options.rounds}
    for name in options.parts:
        measure, table = PARTS[name]
        result[name] = measure(options)
        print(f"\n{result[name]['title']}:\n\n{table(result[name])}\n", flush=True)
    result["machine"]["load_average_after"] = [round(load, 2) for load in os.getloadavg()]
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def _layer(options: argparse.Namespace) -> dict[str, Any]:
    """Shrink one matrix, beside its full singular value decomposition."""
    shape = (options.rows, options.cols)
    noise, spiked = (noisy(shape, spikes).to(options.device) for spikes in ((), SPIKES))
    runs: dict[str, Run] = {
        "full SVD": lambda: torch.linalg.svd(noise, full_matrices=False),
        "denoising, noise": lambda: shrink(noise, 1.0),
        "denoising, spikes": lambda: shrink(spiked, 1.0),
    }
    samples = race(runs, options)
    return {
        "title": f"{shape[0]} × {shape[1]}, float32, noise alone and with {len(SPIKES)} spikes",
        "samples": samples,
        "summary": summarise(samples),
        "distance_to_full_svd": {name: _distance(matrix) for name, matrix in (("noise", noise), ("spikes", spiked))},
    }


def _step(options: argparse.Namespace) -> dict[str, Any]:
    """Shrink every linear layer of a model, beside an ordinary training step of it."""
    workload = WORKLOADS[options.workload]
    materials = workload.materials(options.device)
    shapes = [
        tuple(module.weight.shape)
        for module in materials.model.modules()
        if isinstance(module, torch.nn.Linear) and module.weight.requires_grad
    ]
    step = CONTENDERS["fused"].start(materials)
    runs: dict[str, Run] = {CONTENDERS["fused"].title: step}
    for title, every in (("noise", 0), ("spikes in every tenth", 10), ("spikes in all", 1)):
        matrices = [
            noisy(shape, SPIKES if every and index % every == 0 else (), seed=index).to(options.device)
            for index, shape in enumerate(shapes)
        ]
        runs[f"denoising, {title}"] = lambda matrices=matrices: shrink_all(matrices, 1.0)
    samples = race(runs, options)
    return {"title": f"{workload.title}: {len(shapes)} linear layers", "samples": samples, "summary": summarise(samples)}


def _chance(options: argparse.Namespace) -> dict[str, Any]:
    """Count the matrices of pure noise that are taken for a signal."""
    shares: dict[str, dict[str, float]] = {}
    for rows, cols in SHAPES:
        draws = [noisy((rows, cols), (), seed=seed).to(options.device) for seed in range(options.draws)]
        shares[f"{rows} × {cols}"] = {
            str(kappa): sum(found is not draw for found, draw in zip(shrink_all(draws, 1.0, kappa=kappa), draws, strict=True)) / len(draws)
            for kappa in KAPPAS
        }
    return {"title": f"share of {options.draws} matrices of pure noise that count as a signal", "shares": shares}


def noisy(shape: tuple[int, ...], spikes: Sequence[float], seed: int = 0) -> Tensor:
    """Return standard normal noise around singular vectors with the given strengths."""
    generator = torch.Generator().manual_seed(seed)
    rows, cols = shape
    matrix = torch.randn(rows, cols, generator=generator)
    count = min(len(spikes), rows, cols)
    left, right = (torch.linalg.qr(torch.randn(size, count, generator=generator))[0] for size in (rows, cols))
    return matrix + (left * torch.tensor(spikes[:count])) @ right.T * (rows * cols) ** 0.25


def race(runs: Mapping[str, Run], options: argparse.Namespace) -> Samples:
    """Let each run have its turn in every round, and return the seconds of each turn."""
    samples: Samples = {name: {"wall_s": [], "cpu_s": []} for name in runs}
    for number in range(options.warm_up + options.rounds):
        for name, run in runs.items():
            wall, cpu = _time(run, options.device)
            if number >= options.warm_up:
                samples[name]["wall_s"].append(wall)
                samples[name]["cpu_s"].append(cpu)
    return samples


def _time(run: Run, device: str) -> tuple[float, float]:
    _wait(device)
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    _wait(device)
    return time.perf_counter() - wall, time.process_time() - cpu


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def summarise(samples: Samples) -> dict[str, dict[str, float]]:
    """Return medians, and ratios to the first run."""
    first = next(iter(samples.values()))
    rows: dict[str, dict[str, float]] = {}
    for name, taken in samples.items():
        rows[name] = {measure: median(values) for measure, values in taken.items()}
        for measure, values in taken.items():
            ratios = [mine / theirs for mine, theirs in zip(values, first[measure], strict=True)]
            rows[name][measure.replace("_s", "_ratio")] = median(ratios)
    return rows


def _distance(matrix: Tensor) -> float:
    """Return how far the shrunk matrix is from the formula with a full decomposition in float64, relative to it."""
    shape = (matrix.shape[0], matrix.shape[1])
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    counts = float(values[0]) > 1.02 * bulk_edge(shape, 1.0)
    expected = (left * shrunk_values(values, shape, 1.0)) @ right if counts else matrix.double()
    found = shrink(matrix, 1.0, kappa=1.02, norm_correction=False)
    return float((found - expected).norm() / expected.norm())


def _times(part: Mapping[str, Any]) -> str:
    lines = ["| | wall time | of the first | CPU time | of the first |", "|---|--:|--:|--:|--:|"]
    for name, row in part["summary"].items():
        times = f"{row['wall_s'] * 1e3:.1f} ms | {row['wall_ratio']:.3f} | {row['cpu_s'] * 1e3:.1f} ms | {row['cpu_ratio']:.3f}"
        lines.append(f"| {name} | {times} |")
    for name, distance in part.get("distance_to_full_svd", {}).items():
        lines.append(f"\nRelative distance to the full SVD's result, {name}: {distance:.1e}")
    return "\n".join(lines)


def _shares(part: Mapping[str, Any]) -> str:
    lines = ["| | " + " | ".join(f"kappa {kappa}" for kappa in KAPPAS) + " |", "|---|" + "--:|" * len(KAPPAS)]
    lines += [f"| {shape} | " + " | ".join(f"{share:.3f}" for share in row.values()) + " |" for shape, row in part["shares"].items()]
    return "\n".join(lines)


PARTS: dict[str, tuple[Callable[[argparse.Namespace], dict[str, Any]], Callable[[Mapping[str, Any]], str]]] = {
    "layer": (_layer, _times),
    "step": (_step, _times),
    "chance": (_chance, _shares),
}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--cols", type=int, default=4096)
    parser.add_argument("--workload", choices=WORKLOADS, default="encoder", help="whose linear layers are denoised")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count")
    parser.add_argument("--warm-up", type=int, default=1, help="rounds that do not")
    parser.add_argument("--draws", type=int, default=1000, help="matrices of pure noise for each shape")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--out", type=Path, help="a JSON file for every sample")
    options = parser.parse_args(arguments)
    options.rounds = 2 if options.quick else options.rounds
    return options


if __name__ == "__main__":
    raise SystemExit(main())
