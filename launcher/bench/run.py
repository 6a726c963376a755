"""``kvrelay bench``: checks the settings, starts a server if asked to, sends the load, and builds the result.

All settings are checked before a server is started, so a user learns of a mistake at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import psutil
import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvrelay.common.errors import SettingsError
from kvrelay.common.settings import describe
from kvrelay.launcher.bench.bodies import BodyWriter
from kvrelay.launcher.bench.client import TIMINGS_HEADER, StreamingClient
from kvrelay.launcher.bench.load import LoadRunner
from kvrelay.launcher.bench.machine import CpuMeter, environment
from kvrelay.launcher.bench.records import CpuUse, RequestRecord, RunResult
from kvrelay.launcher.bench.report import print_report, write_result
from kvrelay.launcher.bench.server import DEFAULT_URL, local_settings, model_of
from kvrelay.launcher.bench.settings import BenchSettings
from kvrelay.launcher.bench.summary import rate_window
from kvrelay.launcher.bench.values import parse_id_range, parse_slo
from kvrelay.launcher.bench.workload import Workload, plan_workload
from kvrelay.launcher.errors import BenchError
from kvrelay.launcher.local.deployment import LocalDeployment
from kvrelay.launcher.models import resolve_model
from kvrelay.launcher.progress import announce

_TICK_S = 0.5  # interval between updates of progress and CPU times
_START_AFTER_S = 0.05
_LATE_S = 0.02  # a request this late changes when queues form; a loop this late distorts its measurements
_FULL_CORE = 0.85  # of the single core that the generator can use
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # they end the sending; requests that have ended are reported


@dataclass(frozen=True, slots=True)
class Target:
    """The measured server: URL, model, and its current processes (None: unknown)."""

    url: str
    model: str
    server_pids: Callable[[], Sequence[int]] | None
    deployment: LocalDeployment | None = None  # if we started it


def run(settings: BenchSettings) -> int:
    """Run the command. Returns 0, or 1 if every request failed or the run stopped because of failures.

    Raises KvrelayError if nothing could be measured.
    """
    workload = plan_workload(settings)
    parse_slo(settings.report.slo)
    parse_id_range(settings.prompt.token_ids)
    _check_output(settings.report.output)
    if settings.prompt.prompt_seed is None:
        prompt = dataclasses.replace(settings.prompt, prompt_seed=secrets.randbelow(2**31))
        settings = dataclasses.replace(settings, prompt=prompt)
    with _target(settings) as target:
        result, is_whole = uvloop.run(_measure(settings, workload, target))
    console = Console()
    lost: OSError | None = None
    if settings.report.output is not None:  # first, so that an error in a table cannot lose the measurement
        try:
            write_result(Path(settings.report.output), result)
        except OSError as error:  # a full disk; the tables are all that is left then
            lost = error
    print_report(result, console)
    if lost is not None:
        raise BenchError(f"--output: cannot write {settings.report.output} ({lost.strerror}); the figures are above")
    has_answers = any(record.error is None for record in result.requests if not record.is_warmup)
    return 0 if is_whole and has_answers else 1


def settings_as_given(settings: BenchSettings) -> dict[str, str]:
    """Every setting that has a value, by name, except the API key."""
    flat: dict[str, object] = {}
    for group in dataclasses.fields(settings):
        flat |= dataclasses.asdict(getattr(settings, group.name))
    names = [info.name for info in describe(BenchSettings) if info.name != "api_key"]
    texts = {name: ",".join(map(str, value)) if isinstance(value := flat[name], tuple) else value for name in names}
    return {name: str(value) for name, value in texts.items() if value not in (None, "")}


def doubts(counted: Sequence[RequestRecord], cpu: CpuUse | None) -> list[str]:
    """Reasons to doubt the figures that are not the server's fault."""
    found: list[str] = []
    if num_uncounted := sum(not record.has_usage for record in counted):
        found.append(
            f"the server did not count the tokens of {num_uncounted} answers: a chunk is taken for a token there"
        )
    latest_s = max(record.sent_s - record.due_s for record in counted)
    if latest_s > _LATE_S:
        found.append(f"requests were sent up to {latest_s * 1e3:.0f} ms after they were due")
    if cpu is not None and (cpu.generator > _FULL_CORE or cpu.generator_max_lag_s > _LATE_S):
        found.append(
            f"the generator used {cpu.generator:.2f} cores of the one that it can, and its event loop was late by up to "
            f"{cpu.generator_max_lag_s * 1e3:.0f} ms: it, and not the server, may be what limits the figures"
        )
    return found


def _check_output(output: str | None) -> None:
    """Check before the measurement that the result can be written. Raises SettingsError."""
    if output is None:
        return
    folder = Path(output).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"--output: cannot make {folder} ({error.strerror})") from error
    if not os.access(folder, os.W_OK):
        raise SettingsError(f"--output: cannot write in {folder}")
    if Path(output).is_dir():
        raise SettingsError(f"--output is {output!r}; it must be a file")


@contextmanager
def _target(settings: BenchSettings) -> Iterator[Target]:
    """The server; started first and stopped at the end, if asked for."""
    pids = settings.target.server_pid
    if not settings.is_self_served:
        url = settings.target.url or DEFAULT_URL
        if missing := [str(pid) for pid in pids if not psutil.pid_exists(pid)]:
            raise SettingsError(f"--server-pid is {', '.join(missing)}: there is no such process on this machine")
        model = model_of(url, settings.target.model, settings.target.api_key)
        yield Target(url, model, (lambda: pids) if pids else None)
        return
    if pids:
        raise SettingsError("--server-pid is given with --self-serve, which knows what it starts; leave it out")
    local = local_settings(settings)
    directories = [resolve_model(model.path) for model in local.gateway.named_models()]
    with LocalDeployment.from_settings(local, *directories) as deployment:
        with announce(f"starting {', '.join(deployment.plan.admin_urls)}"):
            deployment.wait_ready(settings.target.start_timeout_s)
        model = model_of(deployment.url, None, None)
        yield Target(deployment.url, model, lambda: list(deployment.pids.values()), deployment)


async def _measure(settings: BenchSettings, workload: Workload, target: Target) -> tuple[RunResult, bool]:
    """Send the load. Returns False beside the result if the run stopped because of failures.

    Raises BenchError if no counted request has ended.
    """
    headers = {TIMINGS_HEADER: "1", "accept": "text/event-stream"}
    if settings.target.api_key is not None:
        headers["authorization"] = f"Bearer {settings.target.api_key}"
    writer = BodyWriter(settings, target.model)
    meter = CpuMeter(target.server_pids)
    started_at = datetime.now(UTC)
    start_s = time.monotonic() + _START_AFTER_S

    def clock() -> float:
        return time.monotonic() - start_s

    timeout_s = settings.load.timeout_s
    client = StreamingClient(target.url, settings.target.api, timeout_s=timeout_s, clock=clock, headers=headers)
    runner = LoadRunner(client, writer, workload, clock=clock, exact_output=settings.prompt.ignore_eos)
    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, runner.stop)
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[sent]} sent, {task.fields[ended]} ended"))
    work = asyncio.create_task(runner.run())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=workload.end_s, sent=0, ended=0)
        try:
            while not work.done():
                await asyncio.wait([work], timeout=_TICK_S)
                meter.sample()
                progress.update(bar, completed=clock(), sent=runner.num_sent, ended=len(runner.records))
            work.result()
        finally:
            for number in _STOP_SIGNALS:
                loop.remove_signal_handler(number)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await client.close()
    records = sorted(runner.records, key=lambda record: (record.due_s, record.stream, record.index))
    records = [msgspec.structs.replace(record, index=index) for index, record in enumerate(records)]
    counted = [record for record in records if not record.is_warmup]
    if not counted and runner.in_vain is not None:
        raise BenchError(f"{runner.in_vain}; so the run stopped in its warm-up")
    if not counted:
        raise BenchError(
            "no counted request has ended, so there is nothing to report; give a longer --duration-s, a higher --rate, "
            "or a shorter --warmup"
        )
    from_s, until_s = rate_window(counted, None if runner.is_stopped else workload.end_s)
    # CPU use must not include the start, the warm-up, or the wait for last answers.
    lag_s = max((late for at_s, late in runner.late if from_s <= at_s <= until_s), default=0.0)
    cpu = meter.use(start_s + from_s, start_s + until_s, max_lag_s=lag_s)
    warnings = doubts(counted, cpu)
    if runner.in_vain is not None:
        warnings.append(f"{runner.in_vain}; so the run stopped early")
    elif runner.is_stopped:
        warnings.append("the run was interrupted: requests that had not ended then are left out")
    if target.deployment is not None:
        restarted = [status.name for status in target.deployment.statuses() if status.num_restarts]
        warnings += [f"{name} died and was restarted during the run" for name in restarted]
    found = RunResult(
        name=settings.report.name or target.model,
        started_at=started_at.isoformat(timespec="seconds"),
        duration_s=until_s - from_s,
        url=target.url,
        model=target.model,
        settings=settings_as_given(settings),
        environment=environment(),
        slo=parse_slo(settings.report.slo),
        requests=records,
        cpu=cpu,
        warnings=warnings,
    )
    return found, runner.in_vain is None
