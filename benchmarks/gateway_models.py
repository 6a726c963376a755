"""A gateway's memory by its number of models: python benchmarks/gateway_models.py [MODEL …], else three times the demo model.

Each number of models runs in a separate process, which loads the application and connects to no worker.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
from pathlib import Path

import psutil

from kvrelay.gateway.app import create_app
from kvrelay.gateway.settings import DiscoverySettings, GatewaySettings, RelaySettings
from kvrelay.launcher.models import resolve_model


def rss_mib(directories: list[Path]) -> float:
    """Memory of this process after it has loaded the application for these models."""
    names = [f"m{number}" for number in range(len(directories))]
    app = create_app(
        GatewaySettings(
            relay=RelaySettings(),
            workers=DiscoverySettings(decode_workers=tuple(f"{name}=tcp://127.0.0.1:1" for name in names)),
            model=tuple(f"{name}={directory}" for name, directory in zip(names, directories, strict=True)),
        )
    )
    memory = psutil.Process().memory_info().rss / 2**20
    del app
    return memory


def main() -> None:
    """Print a line for each number of models."""
    directories = [resolve_model(name, needs_weights=False) for name in sys.argv[1:] or ["demo"] * 3]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        sizes = [pool.apply(rss_mib, (directories[:number],)) for number in range(1, len(directories) + 1)]
    sys.stdout.write(f"1 model: {sizes[0]:.0f} MiB\n")
    for number, (before, after) in enumerate(itertools.pairwise(sizes), start=2):
        sys.stdout.write(
            f"{number} models: {after:.0f} MiB, {after - before:+.1f} MiB for {directories[number - 1].name}\n"
        )


if __name__ == "__main__":
    main()
