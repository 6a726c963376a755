"""Streamed tokens per second through a gateway of one process or several, and what they use of the CPU: for ``gateway.py``.

Beside it the same through the least process that could stand there (``least_gateway.py``), so that a figure says something on a
machine that is at times half as fast as at others.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import psutil
from peers.load import judged

from kvrelay.launcher.bench.records import RunResult, read_result
from kvrelay.launcher.bench.summary import summarize
from kvrelay.launcher.local import LocalDeployment
from kvrelay.launcher.models import resolve_model
from kvrelay.launcher.ports import free_ports
from kvrelay.launcher.settings import LocalSettings

_LEAST = 0  # in the place of a number of processes: the least gateway


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures by name, and what makes them doubtful."""

    figures: dict[str, float]
    warnings: list[str]


def throughput(streams: int, seconds: float, step_ms: float, workers: Sequence[int], rounds: int) -> Measured:
    """Measure and print it, for each number of gateway processes; figures of others than the first are named after it.

    Each round measures all of them, and the least gateway; ratios are those within a round, so a machine that is slower for a while
    is slower for all. Of everything the median counts.
    """
    turns = (_LEAST, *workers)
    measured = [
        {count: measure_throughput(streams, seconds, step_ms, count) for count in turns[:: -1 if number % 2 else 1]}
        for number in range(rounds)
    ]
    figures: dict[str, float] = {}
    warnings: list[str] = []
    for count in (*workers, _LEAST):
        names = measured[0][count].figures
        load = {name: statistics.median(one[count].figures[name] for one in measured) for name in names}
        what = _name_of(count)
        suffix = "" if count == workers[0] else f" {'least' if count == _LEAST else f'workers={count}'}"
        figures |= {f"{name}{suffix}": value for name, value in load.items()}
        print(
            f"{streams} streams, {what}: {load['tokens_per_s']:.0f} tokens/s; gateway "
            f"{load['gateway_us_per_token']:.1f} CPU s per million tokens ({load['gateway_busiest_share']:.0%} of it in one "
            f"process) and {load['gateway_mb']:.0f} MB, worker {load['worker_us_per_token']:.1f} CPU s; "
            f"generator {load.get('generator_cores', float('nan')):.2f} cores, others "
            f"{load.get('other_cores', float('nan')):.2f}, stolen {load.get('stolen_cores', float('nan')):.2f}"
        )
        for number, one in enumerate(measured, 1):
            for warning in one[count].warnings:
                print(f"  doubtful, round {number}: {warning}")
                warnings.append(f"{what}, round {number}: {warning}")
        if suffix:
            ratios = {
                name: statistics.median(one[count].figures[name] / one[workers[0]].figures[name] for one in measured)
                for name in ("gateway_us_per_token", "tokens_per_s")
            }
            figures |= {f"{name}{suffix} ratio": value for name, value in ratios.items()}
            print(
                f"  {what} against {workers[0]}: {ratios['gateway_us_per_token']:.2f} times the CPU time per token, "
                f"{ratios['tokens_per_s']:.2f} times the tokens/s here"
            )
    return Measured(figures, warnings)


def _name_of(workers: int) -> str:
    return "the least gateway" if workers == _LEAST else f"{workers} gateway process(es)"


def measure_throughput(streams: int, seconds: float, step_ms: float, workers: int) -> Measured:
    """Streamed tokens per second with a fake decode worker, and what each process used of the CPU."""
    os.environ |= {
        "KVRELAY_FAKE_STEP_MS": f"{step_ms:g}", "KVRELAY_FAKE_TOKEN_US": "0", "KVRELAY_FAKE_TOKEN_BYTES": "64",
        "KVRELAY_MAX_NUM_SEQS": f"{streams + 56}", "KVRELAY_BUSY_POLL_MS": "0",
    }  # fmt: skip
    settings = LocalSettings(engine="fake", prefill=0, decode=1, port=0, workers=max(1, workers), log_level="warning")
    with (
        tempfile.TemporaryDirectory() as directory,
        LocalDeployment.from_settings(settings, resolve_model("demo")) as deployment,
    ):
        deployment.wait_ready(timeout_s=60)
        with _gateway_of(deployment, workers) as (url, gateways):
            worker = psutil.Process(deployment.pids["decode-0"])
            output = Path(directory) / "result.json"
            command = [
                sys.executable, "-P", "-m", "kvrelay.launcher", "bench", "--url", url, "--concurrency", str(streams),
                "--input-len", "32", "--output-len", "256", "--duration-s", str(seconds), "--output", str(output),
            ]  # fmt: skip
            before_s, worker_before_s = [_cpu_s(one) for one in gateways], _cpu_s(worker)
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
            if not output.exists():
                raise SystemExit(f"the generator failed: {ended.stderr[-2000:]}")
            used_s = [_cpu_s(one) - before for one, before in zip(gateways, before_s, strict=True)]
            worker_s = _cpu_s(worker) - worker_before_s
            memory_mb = sum(one.memory_info().rss for one in gateways) / 2**20
            result = read_result(output)
    return figures_of(result, used_s, worker_s, memory_mb)


def figures_of(result: RunResult, gateway_s: Sequence[float], worker_s: float, memory_mb: float) -> Measured:
    """Pure: from a run, and the CPU time of each of the gateway's processes and of the worker during it.

    Raises SystemExit if requests failed.
    """
    whole = summarize(result).all
    if whole.num_ok != whole.num_requests:
        raise SystemExit(f"{whole.num_requests - whole.num_ok} requests failed: {whole.errors}")
    num_tokens = sum(request.output_tokens for request in result.requests)
    figures = {
        "tokens_per_s": whole.output_tokens_per_s,
        "gateway_us_per_token": sum(gateway_s) / num_tokens * 1e6,
        "gateway_busiest_share": max(gateway_s) / sum(gateway_s),
        "worker_us_per_token": worker_s / num_tokens * 1e6,
        "gateway_mb": memory_mb,
    }
    if result.cpu is None:
        return Measured(figures, result.warnings)
    served = (sum(gateway_s) + worker_s) / max(request.finished_s for request in result.requests)
    others = max(0.0, result.cpu.others - served)  # the generator takes gateway and worker for somebody else's
    result = judged(result, msgspec.structs.replace(result.cpu, server=served, others=others))
    assert result.cpu is not None
    figures |= {
        "generator_cores": result.cpu.generator, "other_cores": others, "stolen_cores": result.cpu.stolen
    }  # fmt: skip
    return Measured(figures, result.warnings)


@contextmanager
def _gateway_of(deployment: LocalDeployment, workers: int) -> Iterator[tuple[str, list[psutil.Process]]]:
    """URL and processes of the deployment's gateway, or of the least one beside it."""
    if workers != _LEAST:
        yield deployment.url, _until_all_serve(psutil.Process(deployment.pids["gateway"]), workers)
        return
    decode = next(spec for spec in deployment.plan.specs if spec.name == "decode-0").command
    address = next(argument.removeprefix("--address=") for argument in decode if argument.startswith("--address="))
    with least_gateway(address) as (url, process):
        _until_it_answers(url)
        yield url, [process]


@contextmanager
def least_gateway(worker_address: str) -> Iterator[tuple[str, psutil.Process]]:
    """URL and process of ``least_gateway.py``, which answers once it has its worker."""
    (port,) = free_ports(1)
    script = str(Path(__file__).with_name("least_gateway.py"))
    command = [sys.executable, script, "--port", str(port), "--decode-workers", worker_address]
    process = subprocess.Popen(command)
    try:
        yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def _until_it_answers(url: str) -> None:
    deadline_s = time.monotonic() + 60
    with httpx.Client(trust_env=False) as client:
        while time.monotonic() < deadline_s:
            with contextlib.suppress(httpx.TransportError):
                client.get(url)
                return
            time.sleep(0.05)
    raise SystemExit("the least gateway did not start")


def _until_all_serve(gateway: psutil.Process, workers: int) -> list[psutil.Process]:
    """The gateway's processes, the parent of several first. Raises SystemExit if they do not come."""
    if workers == 1:
        return [gateway]
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        # One serves as soon as it has its links to the workers.
        children = gateway.children()
        linked = [any(one.raddr for one in child.net_connections("tcp")) for child in children]
        if len(children) == workers and all(linked):
            return [gateway, *children]
        time.sleep(0.1)
    raise SystemExit(f"{workers} processes should serve, and did not begin to")


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
