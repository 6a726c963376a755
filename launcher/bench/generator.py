"""A load generator: one share of a load, sent from one event loop. In this process, or as a process of its own.

As a process it reads its job from stdin, writes its counts to stdout as it goes, and ends with its report; SIGINT and SIGTERM,
or the end of stdin, stop it early. Everything is a line of JSON. All processes share the machine's monotonic clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvloop

from kvrelay.launcher.bench.bodies import BodySpec, BodyWriter
from kvrelay.launcher.bench.client import TIMINGS_HEADER, StreamingClient
from kvrelay.launcher.bench.errors import BenchError
from kvrelay.launcher.bench.http_stream import HttpStreams, ServerAddress
from kvrelay.launcher.bench.load import Counts, LoadRunner
from kvrelay.launcher.bench.records import RequestRecord
from kvrelay.launcher.bench.settings import BenchSettings
from kvrelay.launcher.bench.spec import workload_spec
from kvrelay.launcher.bench.trace import read_trace
from kvrelay.launcher.bench.workload import Share, plan_workload

_COUNTS_EVERY_S = 0.25
_MAX_LINE_BYTES = 2**31


@dataclass(frozen=True, slots=True)
class Job:
    """What a generator is to do."""

    settings: BenchSettings
    body: BodySpec
    url: str
    share: Share
    start_s: float  # of the run, on time.monotonic()


class Report(msgspec.Struct, kw_only=True):
    """What came of it. The records' index is their number within their stream."""

    records: list[RequestRecord]
    is_stopped: bool
    late: list[tuple[float, float]]  # when on the run's clock, and by how much the event loop was, s


class _Line(msgspec.Struct, kw_only=True, omit_defaults=True):
    counts: Counts | None = None
    report: Report | None = None


OnRunner = Callable[[LoadRunner], None]


async def generate(job: Job, on_runner: OnRunner) -> Report:
    """Send the job's share. ``on_runner`` gets the runner before it starts, to watch and to stop it."""
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
        plan_workload(spec, trace, job.share),
        clock=clock,
        exact_output=settings.prompt.ignore_eos,
    )
    on_runner(runner)
    try:
        records = await runner.run()
    finally:
        await streams.close()
    return Report(records=records, is_stopped=runner.is_stopped, late=runner.late)


class GeneratorProcess:
    """A generator in a process of its own: ``start``, then ``report``; ``stop`` at any time."""

    def __init__(self, job: Job) -> None:
        self.counts = Counts()
        self._job = job
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Of the process, once started."""
        assert self._process is not None, "start() comes first"
        return self._process.pid

    async def start(self) -> None:
        """Start it; it begins at the job's start time, or at once if that is over."""
        # -P: the working directory must not come before the installed packages. A session of its own: Ctrl-C reaches us only.
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "kvrelay.launcher.bench.generator"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(self._job) + b"\n")

    async def report(self) -> Report:
        """Wait for the end. Raises BenchError if the process ended without a report."""
        process = self._process
        assert process is not None, "start() comes first"
        assert process.stdout is not None
        decoder = msgspec.json.Decoder(_Line)
        report: Report | None = None
        try:
            async for line in process.stdout:
                message = decoder.decode(line)
                self.counts = message.counts or self.counts
                report = message.report or report
            code = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if report is None:
            raise BenchError(
                f"generator process {process.pid} ended with exit code {code} and no report; see its output above"
            )
        return report

    def stop(self) -> None:
        """Ask it to send nothing more and to report."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)


async def _serve() -> None:
    """The process: one job from stdin."""
    loop = asyncio.get_running_loop()
    lines = await _stdin_lines()
    job = msgspec.json.decode(await anext(lines), type=Job)
    runners: list[LoadRunner] = []

    def stop() -> None:
        for runner in runners:
            runner.stop()

    async def stop_with_parent() -> None:
        async for _ in lines:
            pass
        stop()

    async def tell_counts() -> None:
        while True:
            await asyncio.sleep(_COUNTS_EVERY_S)
            for runner in runners:
                _write(_Line(counts=runner.counts))

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    helpers = [asyncio.create_task(stop_with_parent()), asyncio.create_task(tell_counts())]
    try:
        report = await generate(job, runners.append)
        _write(_Line(counts=runners[0].counts, report=report))
    finally:
        for task in helpers:
            task.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)


async def _stdin_lines() -> AsyncIterator[bytes]:
    reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return aiter(reader)


def _write(line: _Line) -> None:
    data = memoryview(msgspec.json.encode(line) + b"\n")
    while data:
        data = data[os.write(sys.stdout.fileno(), data) :]


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        uvloop.run(_serve())
