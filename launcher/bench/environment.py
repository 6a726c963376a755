"""Where a benchmark ran: what a reader needs to judge its figures. Loads nothing heavy."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import psutil

import kvrelay

_GIT_TIMEOUT_S = 5.0


def environment() -> dict[str, str]:
    """Machine, cores, kernel and versions, in a checkout also its commit; of the machine that the generator runs on."""
    found = {
        "machine": platform.machine(),
        "cpu": _cpu_model() or platform.processor() or "unknown",
        "cores": str(os.cpu_count() or 1),
        "memory_gib": f"{psutil.virtual_memory().total / 2**30:.1f}",
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "kvrelay": kvrelay.__version__,
    }
    commit = checkout_commit(Path(kvrelay.__file__))
    if commit is not None:
        found["commit"] = commit
    for package in ("torch", "triton", "transformers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    variables = {
        name: value for name, value in os.environ.items() if name.startswith(("KVRELAY_", "OMP_NUM_", "MKL_NUM_"))
    }
    found |= {name: value for name, value in variables.items() if not name.endswith("_KEY")}
    return found


def checkout_commit(package: Path) -> str | None:
    """The commit of the checkout around ``ROOT/src/kvrelay/__init__.py``, with "-dirty" if files were changed; None without.

    Only that place: an installed package may lie in the checkout of somebody else's project.
    """
    root = package.parent.parent.parent
    if package.parent.parent.name != "src" or not (root / ".git").exists():
        return None
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        answer = subprocess.run(  # noqa: S603
            command, cwd=root, capture_output=True, text=True, check=True, timeout=_GIT_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def _cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
