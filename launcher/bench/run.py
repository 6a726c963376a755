"""``kvrelay bench``: checks the settings, starts a server if asked to, sends the load, and makes a result of what came.

The order matters to who waits: everything that can be wrong with the settings is found before a server is started.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console

from kvrelay.common.settings import describe
from kvrelay.launcher.bench.bodies import BodySpec
from kvrelay.launcher.bench.cpu import CpuMeter
from kvrelay.launcher.bench.doubts import doubts
from kvrelay.launcher.bench.environment import environment
from kvrelay.launcher.bench.errors import BenchError
from kvrelay.launcher.bench.generator import Job, Report, generate
from kvrelay.launcher.bench.load import LoadRunner
from kvrelay.launcher.bench.load_view import load_view
from kvrelay.launcher.bench.prepare import (
    body_spec,
    check_places,
    check_server_pid,
    length_warnings,
    making_s,
    tokenizer_directory,
)
from kvrelay.launcher.bench.records import CpuUse, RequestRecord, RunResult
from kvrelay.launcher.bench.result_file import write_result
from kvrelay.launcher.bench.server import DEFAULT_URL, ServedModel, local_settings, served_model, vocab_size
from kvrelay.launcher.bench.settings import BenchSettings
from kvrelay.launcher.bench.spec import LoadKind, WorkloadSpec, parse_slo, workload_spec
from kvrelay.launcher.bench.summary import rate_window
from kvrelay.launcher.bench.trace import read_trace
from kvrelay.launcher.bench.values import parse_id_range
from kvrelay.launcher.bench.workload import plan_workload
from kvrelay.launcher.local import LocalDeployment
from kvrelay.launcher.models import resolve_model, served_name
from kvrelay.launcher.progress import stderr_progress

_TICK_S = 0.5  # between two looks at counts and CPU times
_START_AFTER_S = 0.05
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # they end the sending; what has ended by then is reported


@dataclass(frozen=True, slots=True)
class Target:
    """What is measured: where, which model, and its processes as far as they are known."""

    url: str
    model: ServedModel
    vocab_size: int | None
    deployment: LocalDeployment | None  # if we started it
    given_pids: tuple[int, ...] = ()  # of a server that somebody else started on this machine

    @property
    def server_pids(self) -> Callable[[], list[int]] | None:
        """The server's processes just now, to be asked again and again; None if they are not known."""
        if (deployment := self.deployment) is not None:
            return lambda: list(deployment.pids.values())
        return (lambda: list(self.given_pids)) if self.given_pids else None


@dataclass(frozen=True, slots=True)
class Measured:
    """What the generator brought home."""

    report: Report
    window: tuple[float, float]  # that rates are over, on the run's clock
    cpu: CpuUse | None
    started_at: datetime


def run(settings: BenchSettings) -> int:
    """The command; 0, or 1 if every request failed. Raises KvrelayError if nothing could be measured."""
    spec = workload_spec(settings)
    parse_slo(settings.report.slo)
    parse_id_range(settings.prompt.token_ids, "--token-ids")
    trace = read_trace(Path(settings.load.trace)) if settings.load.trace is not None else ()
    check_places(settings)
    check_server_pid(settings)
    if settings.prompt.prompt_seed is None:
        prompt = dataclasses.replace(settings.prompt, prompt_seed=secrets.randbelow(2**31))
        settings = dataclasses.replace(settings, prompt=prompt)
    with _target(settings) as target:
        plan = plan_workload(spec, trace)
        before_s = making_s(plan)
        warnings = length_warnings(plan, target.model)
        body = body_spec(settings, target.model, target.vocab_size)
        measured = uvloop.run(_measure(settings, spec, body, target, before_s))
        restarts = [] if target.deployment is None else _restarts(target.deployment)
    result = make_result(settings, target, measured, [*warnings, *restarts])
    return _report(settings, result)


def make_result(settings: BenchSettings, target: Target, measured: Measured, warnings: Sequence[str]) -> RunResult:
    """Put a result together. Raises BenchError if no request has ended."""
    records = _numbered(measured.report.records)
    counted = [record for record in records if not record.is_warmup]
    if not counted:
        raise BenchError(
            "no counted request has ended, so there is nothing to report; give a longer --duration-s, a higher --rate, "
            "or a shorter --warmup"
        )
    found = list(warnings)
    if measured.report.is_stopped:
        found.append("the run was interrupted: requests that had not ended then are left out")
    found += doubts(counted, measured.cpu)
    from_s, until_s = measured.window
    return RunResult(
        name=settings.report.name or target.model.name,
        started_at=measured.started_at.isoformat(timespec="seconds"),
        duration_s=until_s - from_s,
        url=target.url,
        model=target.model.name,
        settings=settings_as_given(settings),
        environment=environment(),
        slo=parse_slo(settings.report.slo),
        requests=records,
        cpu=measured.cpu,
        warnings=found,
    )


def settings_as_given(settings: BenchSettings) -> dict[str, str]:
    """Every setting that has a value, by name; without the key."""
    flat: dict[str, object] = {}
    for group in dataclasses.fields(settings):
        flat |= dataclasses.asdict(getattr(settings, group.name))
    names = [info.name for info in describe(BenchSettings) if info.name != "api_key"]
    texts = {name: ",".join(map(str, value)) if isinstance(value := flat[name], tuple) else value for name in names}
    return {name: str(value) for name, value in texts.items() if value not in (None, "")}


def _report(settings: BenchSettings, result: RunResult) -> int:
    from kvrelay.launcher.bench.report import print_report  # noqa: PLC0415 - tables and plots only once there is something

    console = Console()
    if settings.report.output is not None:  # first: no table is worth a lost measurement
        write_result(Path(settings.report.output), result)
    print_report(result, console)
    if settings.report.output is not None:
        console.print(f"result: {settings.report.output}", highlight=False)
    if settings.report.plots is not None:
        from kvrelay.launcher.bench.plots import write_plots  # noqa: PLC0415

        write_plots([result], Path(settings.report.plots))
        console.print(f"plots: {settings.report.plots}", highlight=False)
    return 1 if all(record.error is not None for record in result.requests if not record.is_warmup) else 0


@contextmanager
def _target(settings: BenchSettings) -> Iterator[Target]:
    """The server, started if asked for, and stopped in the end."""
    if not settings.is_self_served:
        url = settings.target.url or DEFAULT_URL
        model = served_model(url, settings.target.model, settings.target.api_key)
        size = None if settings.prompt.tokenizer is None else vocab_size(tokenizer_directory(settings.prompt.tokenizer))
        yield Target(url, model, size, None, settings.target.server_pid)
        return
    local = local_settings(settings)
    directory = resolve_model(local.gateway.model)
    deployment = LocalDeployment.from_settings(local, directory)
    with deployment:
        with stderr_progress()(
            f"starting {served_name(local.gateway.model, directory)} with {', '.join(deployment.plan.admin_urls)}"
        ):
            deployment.wait_ready(settings.target.start_timeout_s)
        model = served_model(deployment.url, None, None)
        yield Target(deployment.url, model, vocab_size(directory), deployment)


async def _measure(
    settings: BenchSettings, spec: WorkloadSpec, body: BodySpec, target: Target, before_s: float
) -> Measured:
    """Send the load; ``before_s``: what the generator needs before it begins."""
    start_s = time.monotonic() + _START_AFTER_S + before_s
    runners: list[LoadRunner] = []
    work = asyncio.create_task(generate(Job(settings, body, target.url, start_s), runners.append))

    def stop() -> None:
        for runner in runners:
            runner.stop()

    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, stop)
    meter = CpuMeter(list, target.server_pids)
    started_at = datetime.now(UTC)
    meter.start()
    total_s = None if spec.duration_s is None else spec.warmup.duration_s + spec.duration_s
    total_requests = None if spec.num_requests is None else spec.warmup.num_requests + spec.num_requests
    console = Console(stderr=True)
    console.print(f"measuring {target.model.name} at {target.url}: {describe_load(spec)}", highlight=False)
    with load_view(console, total_s=total_s, total_requests=total_requests) as update:
        try:
            while not work.done():
                await asyncio.wait([work], timeout=_TICK_S)
                meter.sample()
                for runner in runners:
                    update(max(0.0, time.monotonic() - start_s), runner.counts)
            report = work.result()
        finally:
            for number in _STOP_SIGNALS:
                loop.remove_signal_handler(number)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
    window = window_of(spec, report)
    return Measured(report, window, counted_cpu(meter, report, window, start_s), started_at)


def window_of(spec: WorkloadSpec, report: Report) -> tuple[float, float]:
    """What rates are over. A trace may be shorter than the time that it was given, and an interrupted run was not given it."""
    counted = [record for record in report.records if not record.is_warmup]
    is_timed = spec.kind is not LoadKind.TRACE and not report.is_stopped
    return rate_window(counted, spec.duration_s if is_timed else None)


def counted_cpu(meter: CpuMeter, report: Report, window: tuple[float, float], start_s: float) -> CpuUse | None:
    """End the meter; CPU use and lateness of the time that rates are over.

    Neither a start and a warm-up nor the wait for a last answer may blur it. ``start_s`` of the run is on ``time.monotonic()``.
    """
    from_s, until_s = window
    late_s = [late for at_s, late in report.late if from_s <= at_s <= until_s]
    return meter.stop(max(late_s, default=0.0), from_s=start_s + from_s, until_s=start_s + until_s)


def describe_load(spec: WorkloadSpec) -> str:
    """A load in a few words."""
    how = {
        LoadKind.RATE: f"{spec.rate:g} requests/s",
        LoadKind.CONCURRENCY: f"{spec.concurrency} requests at a time",
        LoadKind.TRACE: f"a trace at {spec.trace_speed:g} times its speed",
    }[spec.kind]
    ends = [f" for {spec.duration_s:g} s"] if spec.duration_s is not None else []
    ends += [f", {spec.num_requests} requests"] if spec.num_requests is not None else []
    burst = "" if spec.burst is None else f", and {spec.burst.num} at once every {spec.burst.every_s:g} s"
    return how + "".join(ends) + burst


def _numbered(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """In the order in which they were due, numbered in it."""
    ordered = sorted(records, key=lambda record: (record.due_s, record.stream, record.index))
    return [msgspec.structs.replace(record, index=index) for index, record in enumerate(ordered)]


def _restarts(deployment: LocalDeployment) -> list[str]:
    return [
        f"{status.name} died and was restarted {status.num_restarts} times during the run"
        for status in deployment.statuses()
        if status.num_restarts
    ]
