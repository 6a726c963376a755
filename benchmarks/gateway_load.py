"""Streamed tokens per second through a gateway, and what each process uses of the CPU: for ``gateway.py``."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from kvrelay.launcher.bench.records import RunResult, read_result
from kvrelay.launcher.bench.summary import summarize
from kvrelay.launcher.local.deployment import LocalDeployment
from kvrelay.launcher.models import resolve_model
from kvrelay.launcher.settings import LocalSettings


def throughput(streams: int, seconds: float) -> None:
    """Measure and print streamed tokens per second with a fake decode worker, and what each process used of the CPU."""
    # A step of a millisecond is more than the worker can do.
    settings = LocalSettings.of(
        engine="fake", prefill=0, port=0, log_level="warning", fake_step_ms=1, fake_token_us=0, fake_token_bytes=64,
        max_num_seqs=streams + 56,
    )  # fmt: skip
    with (
        tempfile.TemporaryDirectory() as directory,
        LocalDeployment.from_settings(settings, resolve_model("demo")) as deployment,
    ):
        deployment.wait_ready(timeout_s=60)
        gateway, worker = (psutil.Process(deployment.pids[name]) for name in ("gateway", "decode-0"))
        output = Path(directory) / "result.json"
        command = [
            sys.executable, "-P", "-m", "kvrelay.launcher", "bench", "--url", deployment.url,
            "--concurrency", str(streams), "--input-len", "32", "--output-len", "256",
            "--duration-s", str(seconds), "--output", str(output), "--server-pid", f"{gateway.pid},{worker.pid}",
        ]  # fmt: skip
        before_s, worker_before_s = cpu_s(gateway), cpu_s(worker)
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if not output.exists():
            raise SystemExit(f"the generator failed: {ended.stderr[-2000:]}")
        used_s, worker_s = cpu_s(gateway) - before_s, cpu_s(worker) - worker_before_s
        memory_mb = gateway.memory_info().rss / 2**20
        for line in lines_of(read_result(output), used_s, worker_s, memory_mb):
            print(line)


def lines_of(result: RunResult, gateway_s: float, worker_s: float, memory_mb: float) -> list[str]:
    """Pure: what a run tells, from its result and the CPU time of gateway and worker during it.

    Raises SystemExit if requests failed.
    """
    whole = summarize(result).all
    if whole.num_ok != whole.num_requests:
        raise SystemExit(f"{whole.num_requests - whole.num_ok} requests failed: {whole.errors}")
    millions = sum(request.output_tokens for request in result.requests) / 1e6
    lines = [
        f"{whole.output_tokens_per_s:.0f} tokens/s; gateway {gateway_s / millions:.1f} CPU s per million tokens and "
        f"{memory_mb:.0f} MB, worker {worker_s / millions:.1f} CPU s"
    ]
    if (cpu := result.cpu) is not None:
        lines.append(f"generator {cpu.generator:.2f} cores, others {cpu.others:.2f}, stolen {cpu.stolen:.2f}")
    return [*lines, *(f"  doubtful: {warning}" for warning in result.warnings)]


def cpu_s(process: psutil.Process) -> float:
    """CPU time that it has used."""
    times = process.cpu_times()
    return float(times.user + times.system)
