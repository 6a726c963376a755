"""Assigns the machine's GPUs to the workers of a local deployment: one each while there are enough, then shared.

The GPUs are those that this process sees, named as in ``CUDA_VISIBLE_DEVICES``. A worker of several ranks gets a GPU for each rank,
so its ranks never share one. It may share them with other workers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"

_DEVICE_FILE = re.compile(r"nvidia\d+")


@dataclass(frozen=True, slots=True)
class WorkerRanks:
    """A worker that needs GPUs."""

    name: str
    role: str  # "prefill" or "decode"
    num_ranks: int


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> tuple[str, ...]:
    """Names of the GPUs that this process sees; none without NVIDIA's driver."""
    if (named := environment.get(VISIBLE)) is not None:
        return tuple(name for part in named.split(",") if (name := part.strip()))
    # CUDA counts from 0, even if a container has other device numbers.
    num_gpus = sum(_DEVICE_FILE.fullmatch(path.name) is not None for path in devices.glob("nvidia*"))
    return tuple(map(str, range(num_gpus)))


def assigned(gpus: Sequence[str], workers: Sequence[WorkerRanks]) -> dict[str, tuple[str, ...]]:
    """The GPUs of each worker: as many as it has ranks, always those with the fewest workers so far.

    A worker with more ranks than GPUs gets all of them, and reports later that they are too few.
    """
    num_workers = dict.fromkeys(gpus, 0)
    chosen: dict[str, tuple[str, ...]] = {}
    for worker in workers:
        emptiest = sorted(num_workers, key=num_workers.__getitem__)[: worker.num_ranks]
        chosen[worker.name] = tuple(gpu for gpu in gpus if gpu in emptiest)
        for gpu in emptiest:
            num_workers[gpu] += 1
    return chosen


def memory_fractions(
    chosen: Mapping[str, tuple[str, ...]],
    workers: Sequence[WorkerRanks],
    shares: Callable[[int, int], tuple[float, float]],
) -> dict[str, float]:
    """The memory fraction that each worker may use of each of its GPUs. Its fullest GPU decides.

    ``shares``: gives the fractions of a prefill and a decode worker from the numbers of both on a GPU.
    """
    roles = {worker.name: worker.role for worker in workers}

    def share(name: str, gpu: str) -> float:
        there = [roles[other] for other, its in chosen.items() if gpu in its]
        prefill, decode = shares(there.count("prefill"), there.count("decode"))
        return prefill if roles[name] == "prefill" else decode

    return {name: min(share(name, gpu) for gpu in gpus) for name, gpus in chosen.items()}


def who_has_which(chosen: Mapping[str, tuple[str, ...]]) -> str:
    """The assignment as a line for people."""
    lines = []
    for name, gpus in chosen.items():
        others = [other for other, its in chosen.items() if other != name and set(its) & set(gpus)]
        shared = f" (shared with {', '.join(others)})" if others else ""
        lines.append(f"{name} has {', '.join(gpus)}{shared}")
    return f"GPUs: {'; '.join(lines)}"
