"""Noise from a cipher, summed in float64 and rounded to a public grid."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from lowkey.errors import ConfigError
from lowkey.release.box_muller import Reals, normals, num_words
from lowkey.release.noise import CHUNK, DrawKeys, check_target, in_chunks, noise_like

GRID_BITS = 24
"""The grid is at least this many binary digits finer than the standard deviation."""


class SecureNoise:
    """Noise from AES-256 in counter mode: slower than `SystemNoise`, and unpredictable under standard assumptions on AES.

    Needs the `cryptography` package, which the extra `lowkey[secure]` installs.

    Guarantee:
        Draws are independent of everything outside the source, and no draw repeats, as far as AES-256 is a pseudorandom
        permutation. The sum is taken in float64 and rounded to multiples of `grid_spacing(std)`, which depends on `std` alone; a cast
        of the result to float32 is post-processing. In exact arithmetic the noise is Gaussian up to 63-bit uniforms (no draw
        exceeds 9.4 std). This is no proof against floating-point or timing attacks.
    """

    __slots__ = ("_keys",)

    def __init__(self) -> None:
        _aes_bytes(0, bytes(32), 0)  # fail now, not at the first release, if the cipher is missing
        self._keys = DrawKeys("secure noise")

    @property
    def has_guarantee(self) -> bool:
        """True."""
        return True

    @property
    def description(self) -> str:
        """One line for the privacy statement."""
        return f"AES-256-CTR keyed by the operating system, summed in float64, rounded to a public grid of at most 2^-{GRID_BITS} std"

    def normal(self, like: Tensor, std: float, *, step: int, index: int) -> Tensor:
        """Draw N(0, std²) noise on the grid, with the shape, dtype and device of `like`.

        Guarantee:
            Reads no value of `like`; never returns the same noise twice, whatever `step` and `index` are.
        """
        return noise_like(self, like, std, step=step, index=index)

    def add_(self, total: Tensor, std: float, *, step: int, index: int) -> None:
        """Replace `total` by `total` plus noise, rounded to the grid, chunk by chunk.

        With `std` 0 nothing changes and nothing is rounded.

        Guarantee:
            Never adds the same noise twice, whatever `step` and `index` are. The grid depends on `std` alone.
        """
        check_target(total, std)
        if std == 0 or total.numel() == 0:
            return
        target = total.detach()
        flat = target.contiguous().view(-1)
        _add_aes(flat, std, self._keys.next_key(step, index))
        if not target.is_contiguous():
            target.copy_(flat.view(target.shape))

    def __repr__(self) -> str:
        return "SecureNoise()"


def grid_spacing(std: float) -> float:
    """Return the power of two to whose multiples a secure sum is rounded.

    Args:
        std: Standard deviation of the noise, positive.

    Returns:
        The largest power of two that is at most `std` times 2^-24.

    Guarantee:
        A function of `std` alone, which is public. Rounding to it adds less than 1e-15 of the noise's variance.

    Example:
        >>> grid_spacing(1.5) == 2.0**-24
        True
    """
    # math.frexp writes std as m * 2^e with m in [0.5, 1).
    return max(math.ldexp(1.0, math.frexp(std)[1] - 1 - GRID_BITS), math.ulp(0.0))


def _add_aes(flat: Tensor, std: float, key: bytes) -> None:
    grid = grid_spacing(std)

    def add_chunk(chunk: int) -> None:
        part = flat[chunk * CHUNK : (chunk + 1) * CHUNK]
        # NUMERICS: float64 keeps the sum's own rounding below the grid unless a value exceeds 2^29 std.
        total = part.double().cpu()
        noisy = total.numpy() + std * _aes_normals(total.numel(), key, chunk)
        # PRIVACY: the grid is fixed by std, which is public; a grid chosen from the sum would leak its size.
        np.rint(noisy / grid, out=noisy)
        total.numpy()[:] = noisy * grid
        part.copy_(total)

    in_chunks(add_chunk, flat.numel())


def _aes_normals(count: int, key: bytes, chunk: int) -> Reals:
    words = np.frombuffer(_aes_bytes(8 * num_words(count, np.float64), key, chunk), dtype="<u8")
    return normals(words.astype(np.uint64, copy=False), 1.0, np.float64)[:count]


def _aes_bytes(count: int, key: bytes, chunk: int) -> bytes:
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    except ImportError as error:
        raise ConfigError(
            "SecureNoise() needs the package 'cryptography', which is not installed. Its AES is what makes the noise unpredictable. "
            'Run: pip install "lowkey[secure]"'
        ) from error
    # PRIVACY: the chunk is the high half of the counter block, so no two chunks meet the same block under one key.
    counter = (chunk << 64).to_bytes(16, "big")
    return Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor().update(bytes(count))
