"""A load, what came of it, and how long CPU time is watched meanwhile. What a sample means is in ``figures.py``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from kvrelay.launcher.bench.cpu import CpuMeter
from kvrelay.launcher.bench.doubts import doubts
from kvrelay.launcher.bench.records import CpuUse, RequestRecord, RunResult

SAMPLE_S = 0.25  # between two looks at the CPU times


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop: ``concurrency`` requests at a time, forced to ``output_len`` tokens, random prompts, none used twice.

    ``requests`` in all; or, with ``duration_s``, as many as begin in that time. With ``rate`` it is an open loop: a request is sent
    every 1 / rate seconds, however many are under way, and ``concurrency`` is that of the warm-up only. ``burst`` is `kvrelay
    bench`'s option; engines without a server can do neither.
    """

    concurrency: int
    input_len: int = 128  # tokens
    output_len: int = 64  # tokens
    requests: int | None = None
    duration_s: float | None = None
    burst: str | None = None
    rate: float | None = None  # requests/s
    api: str = (
        "completions"  # as `kvrelay bench` has it: prompts as ids or as text; other generators send what they send
    )

    def with_requests(self, requests: int) -> Load:
        """The same with another number of requests."""
        return dataclasses.replace(self, requests=requests)

    @property
    def words(self) -> str:
        """For people."""
        count = f"{self.requests} requests" if self.requests is not None else f"{self.duration_s:g} s"
        burst = "" if self.burst is None else f", burst {self.burst}"
        pace = f"{self.concurrency} at a time" if self.rate is None else f"{self.rate:g} a second"
        return f"{count}, {pace}, {self.input_len} in / {self.output_len} out{burst}"


def warm_up_of(load: Load) -> Load:
    """What a side answers before it is measured the first time: the same shapes, few tokens."""
    return Load(load.concurrency, load.input_len, output_len=8, requests=load.concurrency, api=load.api)


class SideMeter:
    """CPU time of a side, of the generator, and of everybody else, from now until ``stop``."""

    def __init__(self, server_pids: Callable[[], Iterable[int]], generator_pids: Callable[[], Iterable[int]]) -> None:
        self._meter = CpuMeter(generator_pids, server_pids)
        self._meter.start()

    def sample(self) -> None:
        """Call it every ``SAMPLE_S``."""
        self._meter.sample()

    def stop(self) -> CpuUse | None:
        """What was used."""
        return self._meter.stop(max_lag_s=0.0)


def judged(result: RunResult, cpu: CpuUse | None) -> RunResult:
    """``result`` of `kvrelay bench` with the CPU use of somebody who knows the server's processes, and the doubts that follow.

    From its own CPU use stay what the generator alone knows, and what the hypervisor took in the time that counts. Without ``cpu``
    nothing changes. Pure.
    """
    if cpu is None:
        return result
    counted = [record for record in result.requests if not record.is_warmup]
    own = doubts(counted, result.cpu, num_processes=1)
    if result.cpu is not None:
        cpu = msgspec.structs.replace(
            result.cpu, server=cpu.server, others=cpu.others, generator=cpu.generator, num_cores=cpu.num_cores
        )
    found = doubts(counted, cpu, num_processes=1)
    rest = [warning for warning in result.warnings if warning not in own]
    return msgspec.structs.replace(result, cpu=cpu, warnings=[*rest, *found])


def failures(result: RunResult) -> list[RequestRecord]:
    """Requests that were not answered in full."""
    return [record for record in result.requests if record.error is not None]
