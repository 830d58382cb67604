"""Where Gaussian noise comes from, and which key it is drawn with.

    os.urandom ─▶ 256-bit key of this source in this process ─▶ key of one draw ─▶ counter-based generator ─▶ N(0, std²)

No source reads or moves the global generators of torch, numpy or Python, so `torch.manual_seed` changes nothing here,
and a projection or a sampler that is seeded shares no randomness with the noise.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn, Protocol

import numpy as np
import torch
from torch import Tensor

from lowkey.checks import require_seed
from lowkey.errors import ConfigError, PrivacyBoundaryError
from lowkey.release.box_muller import Reals, normals, num_words

CHUNK = 1 << 16
"""Coordinates drawn from one stretch of the counter on the CPU; fixed, so that no thread count changes a draw."""

_IN_CACHE = 1 << 15
"""Coordinates drawn at a time, whose words and numbers stay in a core's own cache."""

_FEWEST_CHUNKS = 4
"""Below this, starting threads takes longer than they save."""

_CUDA_CHUNK = 1 << 24

_forks = 0
"""How many forks lie between this process and the one that imported lowkey."""


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class NoiseSource(Protocol):
    """Draws Gaussian noise for one coordinate block at a time.

    `step` and `index` name a draw: the release it belongs to and the position of the block in it.

    Guarantee:
        If `has_guarantee`, every call yields noise that is independent of all data and of every other call, in this process
        and in any other, as far as the generator behind it is indistinguishable from random. Values are ideal Gaussians in
        exact arithmetic; rounding to the dtype of the block is not covered, and no floating-point or timing attack is claimed to fail.
    """

    @property
    def has_guarantee(self) -> bool:
        """Whether a privacy statement may rest on this source."""
        ...

    @property
    def description(self) -> str:
        """One line for the privacy statement."""
        ...

    def normal(self, like: Tensor, std: float, *, step: int, index: int) -> Tensor:
        """Draw N(0, std²) noise with the shape, dtype and device of `like`."""
        ...

    def add_(self, total: Tensor, std: float, *, step: int, index: int) -> None:
        """Add N(0, std²) noise to `total` in place, chunk by chunk."""
        ...


class DrawKeys:
    """A 256-bit secret of one process, and the keys derived from it.

    Guarantee:
        No key is handed out twice: the secret comes from the operating system, is replaced in a forked child, is never stored
        or printed, and every derivation counts. Redoing a step after a failure therefore draws new noise.
    """

    __slots__ = ("_attempts", "_owner", "_purpose", "_secret")

    def __init__(self, purpose: str) -> None:
        self._purpose = purpose
        self._renew()

    def _renew(self) -> None:
        self._secret = os.urandom(32)
        self._owner = (os.getpid(), _forks)
        self._attempts: Iterator[int] = itertools.count()

    def next_key(self, step: int, index: int) -> bytes:
        """Return 32 bytes that belong to this call alone."""
        # PRIVACY: a forked child inherits the secret; drawing on would repeat its parent's noise.
        if self._owner != (os.getpid(), _forks):
            self._renew()
        # PRIVACY: the attempt never repeats within a process, so equal (step, index) still give fresh noise.
        return derive_key(self._secret, self._purpose, step, next(self._attempts), index)

    def __repr__(self) -> str:
        return f"DrawKeys({self._purpose!r}, secret hidden)"

    def __reduce__(self) -> NoReturn:
        raise PrivacyBoundaryError(
            "a noise key was about to be copied or stored. Two holders of one key would add the same noise twice, "
            "and whoever reads a stored key can subtract it. Create a new noise source in the process that needs one."
        )


def derive_key(secret: bytes, purpose: str, step: int, attempt: int, index: int) -> bytes:
    """Derive the key of one draw with keyed BLAKE2b.

    Args:
        secret: Up to 64 bytes that nobody else knows.
        purpose: What the randomness is for; different purposes give unrelated keys.
        step: The release that the draw belongs to.
        attempt: How often the source has drawn before.
        index: The block within the release.

    Returns:
        32 bytes.

    Guarantee:
        Different arguments give different inputs to the hash, hence keys that are independent as far as BLAKE2b is a
        pseudorandom function.
    """
    return hashlib.blake2b(f"{purpose}/{step}/{attempt}/{index}".encode(), key=secret, digest_size=32).digest()


class SystemNoise:
    """Noise from a fast counter-based generator, keyed afresh by the operating system.

    CPU blocks use Philox with a 128-bit key and the Box-Muller transform, in as many threads as `torch.get_num_threads()`;
    CUDA blocks use the device's Philox with a 64-bit key; other devices get a copy of CPU noise.

    Guarantee:
        Draws are independent of everything outside the source, and no draw repeats, in exact arithmetic and as far as Philox
        is indistinguishable from random to the adversary. Philox is not a cipher: `SecureNoise` is.
    """

    __slots__ = ("_keys",)

    def __init__(self) -> None:
        self._keys = DrawKeys("system noise")

    @property
    def has_guarantee(self) -> bool:
        """True."""
        return True

    @property
    def description(self) -> str:
        """One line for the privacy statement."""
        return "Philox keyed with 256 bits from the operating system in each process"

    def normal(self, like: Tensor, std: float, *, step: int, index: int) -> Tensor:
        """Draw N(0, std²) noise with the shape, dtype and device of `like`.

        Guarantee:
            Reads no value of `like`; never returns the same noise twice, whatever `step` and `index` are.
        """
        return noise_like(self, like, std, step=step, index=index)

    def add_(self, total: Tensor, std: float, *, step: int, index: int) -> None:
        """Add N(0, std²) noise to `total` in place, chunk by chunk.

        Guarantee:
            Never adds the same noise twice, whatever `step` and `index` are.
        """
        _add_philox(total, std, self._keys.next_key(step, index))

    def __repr__(self) -> str:
        return "SystemNoise()"


class SeededNoise:
    """Noise that anyone who knows the seed can subtract: for tests and paired audits only.

    Guarantee:
        None. Equal `(seed, step, index)` give equal noise, also after a restart; anything else is independent.

    Example:
        >>> zero = torch.zeros(2)
        >>> first = SeededNoise(5).normal(zero, 1.0, step=1, index=0)
        >>> torch.equal(first, SeededNoise(5).normal(zero, 1.0, step=1, index=0))
        True
    """

    __slots__ = ("_seed",)

    def __init__(self, seed: int) -> None:
        self._seed = require_seed("seed", seed)

    @property
    def has_guarantee(self) -> bool:
        """False."""
        return False

    @property
    def description(self) -> str:
        """One line for the privacy statement."""
        return f"NON-PRIVATE: noise replayed from seed {self._seed}, for tests only"

    def normal(self, like: Tensor, std: float, *, step: int, index: int) -> Tensor:
        """Draw the noise that `(seed, step, index)` names, with the shape, dtype and device of `like`.

        Guarantee:
            None: the noise is known to whoever knows the seed.
        """
        return noise_like(self, like, std, step=step, index=index)

    def add_(self, total: Tensor, std: float, *, step: int, index: int) -> None:
        """Add the noise that `(seed, step, index)` names to `total` in place.

        Guarantee:
            None: the noise is known to whoever knows the seed.
        """
        # NUMERICS: the whole integer is hashed, so seeds that agree in their low 32 bits still differ.
        secret = hashlib.blake2b(str(self._seed).encode(), digest_size=32).digest()
        _add_philox(total, std, derive_key(secret, "seeded noise", step, 0, index))

    def __repr__(self) -> str:
        return f"SeededNoise({self._seed})"


def noise_like(source: NoiseSource, like: Tensor, std: float, *, step: int, index: int) -> Tensor:
    """Draw from `source` into a new tensor with the shape, dtype and device of `like`.

    Guarantee:
        The noise is exactly what `source.add_` adds to zeros.
    """
    noise = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    source.add_(noise, std, step=step, index=index)
    return noise


def check_target(total: Tensor, std: float) -> None:
    """Refuse a standard deviation or a dtype that cannot carry the noise.

    Raises:
        ConfigError: If `std` is negative or not finite, or if `total` is not float32 or float64.

    Guarantee:
        Depends on `std` and the dtype alone, never on a value of `total`.
    """
    if not (math.isfinite(std) and std >= 0):
        raise ConfigError(f"std={std} is not a standard deviation. It must be finite and at least 0. Check clip_norm and noise_multiplier.")
    if total.dtype not in (torch.float32, torch.float64):
        raise ConfigError(
            f"noise was asked for in {total.dtype}. Shorter floats round small noise away, so the sum must be float32 or float64. "
            "Sum in float32 and cast after the release."
        )


def in_chunks(add_chunk: Callable[[int], None], numel: int) -> None:
    """Call `add_chunk` once for each chunk of `numel` coordinates, in several threads when that helps.

    Guarantee:
        Every chunk is visited exactly once; their order is free.
    """
    chunks = -(-numel // CHUNK)
    workers = min(torch.get_num_threads(), chunks) if chunks >= _FEWEST_CHUNKS else 1
    if workers <= 1:
        for chunk in range(chunks):
            add_chunk(chunk)
        return
    # The pool lives for one call: threads that outlive it would be missing in a forked child.
    with ThreadPoolExecutor(workers, thread_name_prefix="lowkey-noise") as pool:
        for _ in pool.map(add_chunk, range(chunks)):
            pass


def _add_philox(total: Tensor, std: float, key: bytes) -> None:
    check_target(total, std)
    if std == 0 or total.numel() == 0:
        return
    target = total.detach()
    if not target.is_contiguous():
        target.add_(_philox_on(target.device, target, std, key))
    elif target.device.type == "cuda":
        _add_on_cuda(target.view(-1), std, key)  # pragma: no cover - the tests of it are skipped where there is no such device
    elif target.device.type == "cpu":
        _add_on_cpu(target.view(-1).numpy(), std, key)
    else:
        target.add_(_philox_on(torch.device("cpu"), target, std, key).to(target.device))


def _philox_on(device: torch.device, like: Tensor, std: float, key: bytes) -> Tensor:
    noise = torch.zeros(like.shape, dtype=like.dtype, device=device)
    _add_philox(noise, std, key)
    return noise


def _add_on_cpu(flat: Reals, std: float, key: bytes) -> None:
    # torch keeps 32 bits of a CPU seed, few enough to try them all; numpy's Philox keeps 128.
    philox_key = int.from_bytes(key[:16], "little")

    def add_chunk(chunk: int) -> None:
        # PRIVACY: the chunk sits in the high half of the 256-bit counter, so no two chunks share a block of the generator.
        generator = np.random.Philox(key=philox_key, counter=chunk << 128)
        for start in range(chunk * CHUNK, min((chunk + 1) * CHUNK, len(flat)), _IN_CACHE):
            part = flat[start : min(start + _IN_CACHE, (chunk + 1) * CHUNK)]
            # PRIVACY: the generator goes on from part to part, so no two numbers are made of one word.
            words = generator.random_raw(num_words(len(part), part.dtype.type))
            part += normals(words, std, part.dtype.type)[: len(part)]

    in_chunks(add_chunk, len(flat))


def _add_on_cuda(flat: Tensor, std: float, key: bytes) -> None:
    generator = torch.Generator(device=flat.device)
    generator.manual_seed(int.from_bytes(key[:8], "little", signed=True))
    for part in flat.split(_CUDA_CHUNK):
        part.add_(torch.empty_like(part).normal_(generator=generator), alpha=std)
