"""Measures streamed tokens per second through a gateway, and the CPU use of each process, for ``gateway.py``."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil

from kvrelay.launcher.bench.records import RunResult, read_result
from kvrelay.launcher.bench.summary import summarize
from kvrelay.launcher.local.deployment import LocalDeployment
from kvrelay.launcher.models import resolve_model
from kvrelay.launcher.settings import LocalSettings


def throughput(streams: int, seconds: float, **of_gateway: str | float) -> float:
    """Measure and print streamed tokens per second with a fake decode worker, and the CPU use of each process.

    ``of_gateway``: further settings. Returns tokens per second.
    """
    # The worker cannot reach steps of a millisecond, so they do not limit it.
    settings = LocalSettings.of(
        engine="fake", prefill=0, port=0, log_level="warning", fake_step_ms=1, fake_token_us=0, fake_token_bytes=64,
        max_num_seqs=streams + 56, **of_gateway,
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
        result = read_result(output)
        for line in lines_of(result, used_s, worker_s, memory_mb):
            print(line)
        return summarize(result).all.output_tokens_per_s


def trace_cost(streams: int, seconds: float, repeats: int) -> None:
    """Measure and print streamed tokens per second without traces and with a tenth of the requests traced, in turns."""
    found: dict[str, list[float]] = {"off": [], "sampled at 10 %": []}
    with collector() as url:
        for number in range(2 * repeats):
            name = list(found)[(number + number // 2) % 2]  # off on on off: drift affects both
            traced: dict[str, str | float] = {} if name == "off" else {"trace_endpoint": url, "trace_sample": 0.1}
            print(f"traces {name}:")
            found[name].append(throughput(streams, seconds, **traced))
    off, on = (statistics.median(speeds) for speeds in found.values())
    spread = max((max(speeds) - min(speeds)) / statistics.median(speeds) for speeds in found.values())
    print(
        f"traces cost {1 - on / off:.1%} of streamed tokens/s (medians of {repeats} turns each, which differ by up to {spread:.1%})"
    )


@contextmanager
def collector() -> Iterator[str]:
    """Receives traces and drops them. Yields its URL. It runs in this process, which is idle during measurements."""

    class Forget(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Forget) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def lines_of(result: RunResult, gateway_s: float, worker_s: float, memory_mb: float) -> list[str]:
    """The lines about a run, from its result and the CPU time of gateway and worker. Pure.

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
    """The CPU time that a process has used."""
    times = process.cpu_times()
    return float(times.user + times.system)
