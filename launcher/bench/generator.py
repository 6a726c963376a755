"""The load generator: sends a load from one event loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvrelay.launcher.bench.bodies import BodySpec, BodyWriter
from kvrelay.launcher.bench.client import TIMINGS_HEADER, StreamingClient
from kvrelay.launcher.bench.http_stream import HttpStreams, ServerAddress
from kvrelay.launcher.bench.load import LoadRunner
from kvrelay.launcher.bench.records import RequestRecord
from kvrelay.launcher.bench.settings import BenchSettings
from kvrelay.launcher.bench.spec import workload_spec
from kvrelay.launcher.bench.trace import read_trace
from kvrelay.launcher.bench.workload import plan_workload


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be sent."""

    settings: BenchSettings
    body: BodySpec
    url: str
    start_s: float  # of the run, on time.monotonic()


@dataclass(frozen=True, slots=True)
class Report:
    """What came of it. The records' index is their number within their stream."""

    records: list[RequestRecord]
    is_stopped: bool
    late: list[tuple[float, float]]  # when on the run's clock, and by how much the event loop was, s


OnRunner = Callable[[LoadRunner], None]


async def generate(job: Job, on_runner: OnRunner) -> Report:
    """Send the job's load. ``on_runner`` gets the runner before it starts, to watch and to stop it."""
    settings = job.settings
    spec = workload_spec(settings)
    trace = read_trace(Path(settings.load.trace)) if settings.load.trace is not None else ()
    headers = {TIMINGS_HEADER: "1", "accept": "text/event-stream"}
    if settings.target.api_key is not None:
        headers["authorization"] = f"Bearer {settings.target.api_key}"

    def clock() -> float:
        return time.monotonic() - job.start_s

    streams = HttpStreams(ServerAddress(job.url), headers)
    client = StreamingClient(streams, settings.target.api, timeout_s=settings.load.timeout_s, clock=clock)
    runner = LoadRunner(
        client,
        BodyWriter(job.body),
        plan_workload(spec, trace),
        clock=clock,
        exact_output=settings.prompt.ignore_eos,
    )
    on_runner(runner)
    try:
        records = await runner.run()
    finally:
        await streams.close()
    return Report(records, runner.is_stopped, runner.late)
