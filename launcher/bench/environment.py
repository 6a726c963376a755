"""Where a benchmark ran: what a reader needs to judge its figures. Loads nothing heavy."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import psutil

import kvrelay


def environment() -> dict[str, str]:
    """Machine, cores, kernel and versions; of the machine that the generator runs on."""
    found = {
        "machine": platform.machine(),
        "cpu": _cpu_model() or platform.processor() or "unknown",
        "cores": str(os.cpu_count() or 1),
        "memory_gib": f"{psutil.virtual_memory().total / 2**30:.1f}",
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "kvrelay": kvrelay.__version__,
    }
    for package in ("torch", "triton", "transformers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
