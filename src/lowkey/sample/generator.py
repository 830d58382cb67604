"""The generators that decide who takes part; none of them shares a key with the noise."""

from __future__ import annotations

import hashlib
import os

import numpy as np


def sampling_generator(seed: int | None) -> np.random.Generator:
    """Make the generator of a run's Poisson draws.

    Args:
        seed: None for 128 fresh bits from the operating system; an integer replays its draws and is for tests.

    Returns:
        A counter-based generator of its own.

    Guarantee:
        Without a seed, draws are unpredictable and independent of every other generator, whatever `torch.manual_seed` or
        `numpy.random.seed` were told. With one, whoever knows it knows who took part, and amplification does not hold against them.
    """
    # PRIVACY: amplification needs draws that nobody can predict, so the key is fresh and never stored.
    key = os.urandom(16) if seed is None else _hashed(f"poisson/{seed}")
    return _keyed(key)


def order_generator(seed: int, epoch: int) -> np.random.Generator:
    """Make the generator of one epoch's order, which needs no secrecy because nothing is amplified.

    Guarantee:
        A function of `(seed, epoch)` alone, so a resumed run meets each example at most once an epoch.
    """
    return _keyed(_hashed(f"order/{seed}/{epoch}"))


def _hashed(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=16).digest()


def _keyed(key: bytes) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
