"""Train a small network privately on drawn digits, in a loop of one's own.

    python examples/digits.py               the full gradient: DP-SGD, with Adam
    python examples/digits.py --rank 16     the same run in random sketches of 16 dimensions per matrix: DP-GRAPE
    python examples/digits.py --no-privacy  the same loop without clipping and noise, to compare

The digits are drawn by this file, so nothing is downloaded; they stand in for private images.
"""

from __future__ import annotations

import argparse
import functools
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lowkey as lk
from lowkey.methods import Method

# Each digit is five rows of three pixels; a row is a number from 0 to 7.
GLYPHS = ("75557", "26227", "71747", "71317", "55711", "74717", "74757", "71122", "75757", "75717")
NUM_TRAIN, NUM_TEST = 8_000, 2_000


def draw_digits(num_examples: int, seed: int) -> TensorDataset:
    """Draw 8 x 8 images of digits in one of two places, with random strength and pixel noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (num_examples,), generator=generator)
    bits = torch.tensor([[[int(row) >> shift & 1 for shift in (2, 1, 0)] for row in glyph] for glyph in GLYPHS], dtype=torch.float32)
    lefts = torch.randint(2, 4, (num_examples,), generator=generator).tolist()
    images = 0.3 * torch.randn(num_examples, 8, 8, generator=generator)
    strengths = 0.75 + 0.5 * torch.rand(num_examples, 1, 1, generator=generator)
    for image, glyph, left in zip(images, bits[labels] * strengths, lefts, strict=True):
        image[1:6, left : left + 3] += glyph
    return TensorDataset(2.0 * images.flatten(1), labels)


def build_model() -> nn.Module:
    """Return a network of 85,002 weights, from the same start each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10))


@torch.no_grad()
def accuracy(model: nn.Module, dataset: TensorDataset) -> float:
    """Return the share of examples that the model gets right."""
    images, labels = dataset.tensors
    return float((model(images).argmax(1) == labels).float().mean())


def train(model: nn.Module, dataset: TensorDataset, method: Method, learning_rate: float, epsilon: float) -> str:
    """Train `model` in place, and return what may be said about its privacy."""
    plan = lk.calibrate(epsilon=epsilon, delta=1e-5, num_examples=len(dataset), expected_batch_size=500, num_steps=100)
    print(f"{plan.num_steps} steps of about {plan.expected_batch_size} examples, noise {plan.noise_multiplier:.3f} times the clip norm")
    optimizer = functools.partial(torch.optim.Adam, lr=learning_rate)
    with lk.privatize(model, optimizer, method=method, plan=plan, clip_norm=1.0) as private:
        released = sum(math.prod(shape) for sketch in private.sketches.values() for shape in sketch.blocks.values())
        print(f"{type(method).__name__}: {released:,} of {sum(p.numel() for p in model.parameters()):,} numbers are released in a step")
        for batch in lk.poisson_batches(dataset, plan):
            for images, labels in lk.split(batch, 128):
                private.backward(F.cross_entropy(model(images), labels, reduction="none"))
            private.step()
        return private.statement().headline


def main() -> None:
    """Train, test, and state the guarantee."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=0, help="kept dimensions per matrix; 0 for the full gradient")
    parser.add_argument("--learning-rate", type=float, default=0.015, help="Adam's")
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--no-privacy", action="store_true", help="neither clip nor add noise")
    args = parser.parse_args()
    private_method = lk.Grape(rank=args.rank, refresh_every=50) if args.rank else lk.DPSGD()
    method = lk.nonprivate.NonPrivate() if args.no_privacy else private_method

    model = build_model()
    headline = train(model, draw_digits(NUM_TRAIN, seed=1), method, args.learning_rate, args.epsilon)
    print(f"accuracy on {NUM_TEST} other digits: {accuracy(model, draw_digits(NUM_TEST, seed=2)):.3f}")
    print(headline)


if __name__ == "__main__":
    main()
