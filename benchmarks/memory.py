"""Resident memory of this process, read where Linux keeps it."""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def resident_bytes() -> int:
    """Return what is resident now."""
    return _read("VmRSS")


def peak_bytes() -> int:
    """Return the most that was resident since `reset_peak`."""
    return _read("VmHWM")


def reset_peak() -> None:
    """Forget earlier peaks, so that what loading a library took does not count."""
    _CLEAR.write_text("5", encoding="ascii")


def _read(key: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_STATUS} has no {key}. Memory is measured on Linux only. Pass --skip-memory.")
