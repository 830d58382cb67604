"""The arithmetic in which norms and sums are taken, whatever the rest of the program runs in."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def in_full_precision(device: torch.device) -> Generator[None]:
    """Switch autocast off, and every shorter format in which a backend may multiply float32 matrices.

    Guarantee:
        Inside, a float32 product keeps 24 bits of its factors. Torch's own setting for convolutions on CUDA keeps 11,
        and a bfloat16 autocast keeps 8, at which an example can pass its limit by a third of a percent.
    """
    before = [(backend, name, getattr(backend, name)) for backend, name, _ in _SWITCHES]
    for backend, name, full in _SWITCHES:
        setattr(backend, name, full)
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for backend, name, value in before:
            setattr(backend, name, value)


def _switches() -> list[tuple[Any, str, object]]:
    """List what decides how float32 matrices are multiplied: torch keeps one setting for each backend and operation since 2.9."""
    cuda, cudnn, mkldnn = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.mkldnn
    if hasattr(cudnn, "conv"):
        parts = (cuda, cudnn.conv, mkldnn.matmul, mkldnn.conv)
        return [(part, "fp32_precision", "ieee") for part in parts]
    return [(cuda, "allow_tf32", False), (cudnn, "allow_tf32", False)]  # pragma: no cover # reason: for earlier versions of torch


_SWITCHES = _switches()
