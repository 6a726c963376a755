"""Shares of one GPU: they add up in any order of starts, and a restarted worker gets its old share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kvrelay.engine.backends.cuda import build as cuda
from kvrelay.engine.backends.cuda.memory import GpuMemory, pool_nbytes

GIB = 2**30
CUDA = GIB // 2  # a process's memory beyond its allocations


def pools_of(order: Sequence[int], shares: Sequence[float], total: int, weights: int, step: int) -> dict[int, int]:
    """The pool of each worker. All have loaded their weights, then each measures and allocates, in ``order``."""
    free = total - len(shares) * (weights + CUDA)
    pools: dict[int, int] = {}
    for worker in order:
        pools[worker] = pool_nbytes(GpuMemory(total, free, weights, step), shares[worker])
        free -= pools[worker]
    # All workers may run their largest steps at the same time.
    assert free >= len(shares) * step
    return pools


@pytest.mark.parametrize("shares", [(0.9,), (0.4, 0.5), (0.3, 0.3, 0.3)])
def test_the_order_in_which_workers_start_does_not_matter(shares: tuple[float, ...]) -> None:
    expected = [int(80 * GIB * share) - 8 * GIB - GIB for share in shares]
    for order in itertools.permutations(range(len(shares))):
        pools = pools_of(order, shares, total=80 * GIB, weights=8 * GIB, step=GIB)
        assert [pools[worker] for worker in range(len(shares))] == expected


def test_one_that_measures_before_the_other_has_loaded_gets_no_more_than_its_share() -> None:
    first = pool_nbytes(GpuMemory(total=24 * GIB, free=15 * GIB, held=8 * GIB, step=GIB), 0.4)
    late = GpuMemory(total=24 * GIB, free=24 * GIB - 16 * GIB - 2 * CUDA - first, held=8 * GIB, step=GIB)
    assert first == int(24 * GIB * 0.4) - 9 * GIB > 0
    assert pool_nbytes(late, 0.5) == 12 * GIB - 9 * GIB


def test_one_that_starts_again_gets_what_it_had() -> None:
    def measured(free: int) -> GpuMemory:
        return GpuMemory(80 * GIB, free, held=16 * GIB, step=GIB)

    alone = pool_nbytes(measured(free=63 * GIB), 0.5)
    assert pool_nbytes(measured(free=63 * GIB - 32 * GIB), 0.5) == alone


def test_others_may_have_left_less_and_a_share_may_hold_nothing() -> None:
    assert pool_nbytes(GpuMemory(total=100, free=10, held=20, step=4), 0.9) == 5
    assert pool_nbytes(GpuMemory(total=100, free=3, held=20, step=4), 0.9) == 0
    assert pool_nbytes(GpuMemory(total=100, free=60, held=40, step=0), 0.3) == 0


def test_memory_is_measured_beside_the_weights_and_the_largest_steps_own_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's counters are replaced: 16 GiB of weights, then a step of 1 GiB over a pool of 2 GiB."""
    calls: list[str] = []
    monkeypatch.setattr(cuda, "run_largest_step", lambda *_: calls.append("step") or 2 * GIB)
    played = {
        "memory_allocated": lambda _: 16 * GIB,
        "reset_peak_memory_stats": lambda _: calls.append("reset"),
        "synchronize": lambda _: None,
        "max_memory_allocated": lambda _: 19 * GIB,
        "empty_cache": lambda: calls.append("empty"),
        "memory_reserved": lambda _: 17 * GIB,
        "mem_get_info": lambda _: calls.append("look") or (60 * GIB, 80 * GIB),
    }
    for name, function in played.items():
        monkeypatch.setattr(torch.cuda, name, function)
    nothing = cast(Any, None)
    options: Any = SimpleNamespace(adapter_bytes=GIB, head_bytes=GIB)  # neither is loaded yet
    assert cuda.measure_memory(nothing, nothing, nothing, nothing, options) == GpuMemory(
        total=80 * GIB, free=58 * GIB, held=19 * GIB, step=GIB
    )
    assert calls == ["reset", "step", "empty", "look"]
