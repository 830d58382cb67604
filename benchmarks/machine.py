"""What a measurement ran on, in words that name no machine."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = ("lowkey", "torch", "transformers", "opacus", "numpy")


def describe_machine(device: str, threads: int) -> dict[str, object]:
    """Return processor, memory, versions and load."""
    facts: dict[str, object] = {
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "memory_gib": round(int((_field("/proc/meminfo", "MemTotal") or "0 kB").split()[0]) / 2**20, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }
    if device.startswith("cuda"):
        facts["gpu"] = torch.cuda.get_device_name()
        facts["tf32"] = torch.backends.cuda.matmul.allow_tf32
    facts.update({name: found for name in PACKAGES if (found := _version(name)) is not None})
    return facts


def _version(name: str) -> str | None:
    if name == "torch":
        return torch.__version__
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _field(path: str, key: str) -> str | None:
    for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None
