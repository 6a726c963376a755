"""How well the generator kept up, and who used the CPU: only of the time that counts."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from kvrelay.launcher.bench.cpu import CpuMeter, CpuSample, cpu_use, machine_times
from kvrelay.launcher.bench.watch import TICK_S, Watched, generator_load, watch


def test_one_full_second_of_one_process_is_found() -> None:
    """10 s: three quiet processes and one that was full for a second. The average of all is 0.1 cores a process."""
    quiet = Watched(cpu=[(float(second), 0.0) for second in range(11)])
    busy = Watched(cpu=[(float(second), 0.95 * (second > 5)) for second in range(11)])
    assert generator_load([quiet, quiet, busy, quiet], 0.0, 10.0).busiest == pytest.approx(0.95)
    assert generator_load([quiet, busy], 0.0, 4.5).busiest == 0.0
    assert generator_load([quiet, busy], 6.5, 10.0).busiest == 0.0
    assert generator_load([Watched(cpu=[(0.0, 0.0), (0.01, 0.01)])], 0.0, 10.0).busiest is None  # too short to say


def test_lateness_counts_within_the_time_only() -> None:
    ticks = [(TICK_S * number, 0.001) for number in range(1000)]
    watched = Watched(lag=[(-1.0, 0.9), *ticks, (50.0, 0.8)])
    load = generator_load([watched], 0.0, 30.0)
    assert load.max_lag_s == 0.001
    assert load.lag_p99_s == pytest.approx(0.001)
    assert generator_load([watched], 60.0, 70.0).lag_p99_s is None


def test_a_long_delay_weighs_as_long_as_it_lasted() -> None:
    """200 ms of every 4 s: one tick of 191 is late, but a chunk that comes at any moment is late with one chance in twenty."""
    lag = []
    for start_s in range(0, 40, 4):
        lag += [(start_s + TICK_S * number, 0.0) for number in range(190)]
        lag.append((start_s + 4.0, 0.2))
    load = generator_load([Watched(lag=lag)], 0.0, 40.0)
    assert load.lag_p99_s is not None
    assert load.lag_p99_s > 0.15
    assert load.max_lag_s == 0.2


async def test_what_is_written_down_ends_with_the_run() -> None:
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 0.25
        return now_s

    watched = Watched()
    task = asyncio.create_task(watch(watched, clock))
    while len(watched.lag) < 6:
        await asyncio.sleep(TICK_S / 4)  # polls for a state; the test's limit bounds it
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert [late for _, late in watched.lag] == pytest.approx([0.25 - TICK_S] * len(watched.lag))
    steps = [after - before for (before, _), (after, _) in zip(watched.cpu, watched.cpu[1:], strict=False)]
    assert all(step >= 1.0 for step in steps[:-1])
    assert len(watched.cpu) >= 3


def used(at_s: float, own_s: float, server_s: float, busy_s: float) -> CpuSample:
    return CpuSample(at_s=at_s, own_s=own_s, server_s=server_s, busy_s=busy_s, stolen_s=0.0)


def test_neither_start_nor_tail_blurs_the_cpu_use() -> None:
    """10 s of start at a full core, 10 s of load at 0.5, 100 s of waiting for an answer that never comes."""
    samples = [used(0, 0, 0, 0), used(10, 10, 0, 10), used(20, 15, 8, 25), used(120, 15, 8, 25)]
    load = cpu_use(samples, num_cores=4, has_server=True, max_lag_s=0.0, from_s=10.0, until_s=20.0)
    assert load is not None
    assert (load.generator, load.server, load.others) == (0.5, 0.8, pytest.approx(0.2))
    # Between two samples, as if it was used evenly.
    part = cpu_use(samples, num_cores=4, has_server=False, max_lag_s=0.0, from_s=15.0, until_s=20.0)
    assert part is not None
    assert (part.generator, part.server, part.others) == (0.5, None, pytest.approx(1.0))
    whole = cpu_use(samples, num_cores=4, has_server=True, max_lag_s=0.0)
    assert whole is not None
    assert whole.generator == 15 / 120
    assert cpu_use(samples, num_cores=4, has_server=True, max_lag_s=0.0, from_s=130.0, until_s=140.0) is None
    assert cpu_use([], num_cores=4, has_server=True, max_lag_s=0.0) is None


def test_the_meter_sees_what_this_process_uses() -> None:
    meter = CpuMeter(list, lambda: [os.getppid()])
    meter.start()
    before = machine_times()
    assert before is not None
    sum(range(3_000_000))
    use = meter.stop(0.0)
    assert use is not None
    assert use.generator > 0
    assert use.num_cores == before.num_cores >= 1
    assert machine_times(Path("/no/such/file")) is None
