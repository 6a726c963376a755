"""One gateway in front of a hundred workers: the highest request rate it holds for a minute, and what limits it.

    .venv/bin/python benchmarks/fleet.py                                   # 50 prefill and 50 decode workers; about 6 minutes
    .venv/bin/python benchmarks/fleet.py --workers 4 --seconds 5           # a look

The workers are real processes with the fake engine: tokens at a set pace, KV blocks really shipped and verified, no weights.
Requests arrive at random (Poisson) at a rate that is doubled until it is not held, then bisected; the last rate that was held is
then run for ``--seconds``, and lowered by a tenth until it is held for so long. A rate is held if no request fails, 99 of 100 get
their first token within a second and the rest at no less than half the engine's pace, no queue is growing, and the generator
was on time. Everything runs on this machine, so the CPU time by component is printed beside the rate.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import click
import msgspec
import psutil
from peers.load import judged

from kvrelay.launcher.bench.records import RunResult, read_result
from kvrelay.launcher.bench.summary import StreamSummary, meets, summarize, ttft
from kvrelay.launcher.local import LocalDeployment
from kvrelay.launcher.models import resolve_model
from kvrelay.launcher.settings import LocalSettings

INPUT_LEN, OUTPUT_LEN = 128, 64
MAX_GROWTH = 2.0  # of the median TTFT from the first third of a run to its last
MAX_GROWTH_S = 0.1  # … by at least so much
MAX_TTFT_S = 1.0
MAX_PACE = 2.0  # time for a request's tokens, in steps of the engine
MIN_GOOD = 0.99  # of all requests
MAX_LATE_S = 0.25  # of the generator's own requests


@dataclass(frozen=True, slots=True)
class Trial:
    """One rate, tried."""

    rate: float
    result: RunResult
    whole: StreamSummary
    cores: dict[str, float]  # by component, during the trial
    failures: list[str]  # why the rate was not held; empty if it was

    def line(self) -> str:
        """One line for people."""
        cores = ", ".join(f"{name} {used:.2f}" for name, used in self.cores.items())
        first, gap = self.whole.ttft, self.whole.itl
        times = "no answers"
        if first is not None and gap is not None:
            times = f"TTFT p50 {first.p50 * 1e3:.0f} p99 {first.p99 * 1e3:.0f} ms"
            times += f", ITL p50 {gap.p50 * 1e3:.1f} p99 {gap.p99 * 1e3:.1f} ms"
        verdict = "held" if not self.failures else "not held: " + "; ".join(self.failures)
        if self.result.cpu is not None:
            cores += f", others {self.result.cpu.others:.2f}, stolen {self.result.cpu.stolen:.2f}"
        text = (
            f"{self.rate:7.1f} req/s  {self.whole.output_tokens_per_s:7.0f} tok/s  {times}  cores: {cores}  {verdict}"
        )
        return "\n".join([text, *(f"    doubtful: {warning}" for warning in self.result.warnings)])


class Fleet:
    """A running deployment of fakes."""

    def __init__(self, deployment: LocalDeployment, step_s: float, directory: Path) -> None:
        self._deployment = deployment
        self._step_s = step_s
        self._directory = directory

    def try_rate(self, rate: float, seconds: float) -> Trial:
        """Send ``rate`` requests a second for ``seconds``."""
        output = self._directory / f"{rate:.2f}.json"
        before = self._cpu_s()
        arguments = [
            "--url", self._deployment.url, "--rate", f"{rate}", "--duration-s", f"{seconds}", "--input-len", f"{INPUT_LEN}",
            "--output-len", f"{OUTPUT_LEN}", "--warmup", "2s", "--output", f"{output}", "--timeout-s", "60",
        ]  # fmt: skip
        command = [sys.executable, "-P", "-m", "kvrelay.launcher", "bench", *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if not output.exists():
            raise SystemExit(f"the generator failed: {ended.stderr[-2000:]}")
        after = self._cpu_s()
        result = read_result(output)
        elapsed_s = max(request.finished_s for request in result.requests)
        cores = {name: (after[name] - before[name]) / elapsed_s for name in after}
        if result.cpu is not None:
            used = sum(cores.values())
            others = max(0.0, result.cpu.others - used)  # the generator takes the fleet for somebody else's
            cores["generator"] = result.cpu.generator
            result = judged(result, msgspec.structs.replace(result.cpu, server=used, others=others))
        return Trial(rate, result, summarize(result).all, cores, why_not_held(result, self._step_s))

    def memory_mb(self) -> dict[str, float]:
        """Resident memory of the gateway, and of one worker (median)."""
        sizes: dict[str, list[float]] = {"gateway": [], "worker": []}
        for name, pid in self._deployment.pids.items():
            sizes["gateway" if name == "gateway" else "worker"].append(psutil.Process(pid).memory_info().rss / 1e6)
        return {name: statistics.median(values) for name, values in sizes.items()}

    def idle_cores(self, seconds: float) -> float:
        """What the workers use when there is nothing to do."""
        before = self._cpu_s()
        time.sleep(seconds)
        after = self._cpu_s()
        return sum(after[name] - before[name] for name in ("prefill workers", "decode workers")) / seconds

    def _cpu_s(self) -> dict[str, float]:
        used = {"gateway": 0.0, "prefill workers": 0.0, "decode workers": 0.0}
        for name, pid in self._deployment.pids.items():
            times = psutil.Process(pid).cpu_times()
            kind = "gateway" if name == "gateway" else f"{name.partition('-')[0]} workers"
            used[kind] += times.user + times.system
        return used


def why_not_held(result: RunResult, step_s: float) -> list[str]:
    """Pure: reasons why the server did not keep up with the rate."""
    counted = [request for request in result.requests if not request.is_warmup]
    failures = []
    if failed := [request for request in counted if request.error is not None]:
        failures.append(f"{len(failed)} of {len(counted)} requests failed ({failed[0].error})")
    firsts = [value for request in counted if request.error is None and (value := ttft(request)) is not None]
    slo = {"ttft": MAX_TTFT_S, "e2e": MAX_TTFT_S + MAX_PACE * step_s * OUTPUT_LEN}
    good = [request for request in counted if meets(request, slo)]
    if len(good) < MIN_GOOD * len(counted):
        failures.append(f"only {100 * len(good) / len(counted):.1f} % of the requests were served in time")
    third = len(firsts) // 3
    if third:
        early, late = statistics.median(firsts[:third]), statistics.median(firsts[-third:])
        if late > MAX_GROWTH * early and late - early > MAX_GROWTH_S:
            failures.append(f"the median TTFT grew from {early * 1e3:.0f} to {late * 1e3:.0f} ms")
    lateness = max((request.sent_s - request.due_s for request in counted), default=0.0)
    if lateness > MAX_LATE_S:
        failures.append(f"the generator was late by {lateness:.2f} s")
    return failures


def highest_rate(fleet: Fleet, start: float, probe_s: float, final_s: float) -> Trial:
    """Double, bisect, then run for ``final_s``; goes down by a tenth until that is held. Prints every trial."""

    def held(rate: float) -> bool:
        trial = fleet.try_rate(rate, probe_s)
        print(trial.line(), flush=True)
        return not trial.failures

    low, high = 0.0, start
    while held(high):
        low, high = high, high * 2
    for _ in range(3):
        middle = (low + high) / 2
        low, high = (middle, high) if held(middle) else (low, middle)
    rate = low
    while rate >= 1:
        trial = fleet.try_rate(rate, final_s)
        print(f"for {final_s:g} s: {trial.line()}", flush=True)
        if not trial.failures:
            return trial
        rate *= 0.9
    raise SystemExit("not even one request per second is held")


@contextmanager
def fleet_of(num_workers: int, step_ms: float, directory: Path) -> Iterator[Fleet]:
    """``num_workers`` prefill and as many decode fakes behind one gateway."""
    os.environ |= {
        "KVRELAY_FAKE_STEP_MS": f"{step_ms:g}", "KVRELAY_FAKE_TOKEN_US": "20", "KVRELAY_FAKE_TOKEN_BYTES": "1024",
        "KVRELAY_KV_MEMORY_MB": "16",
    }  # fmt: skip
    settings = LocalSettings(
        engine="fake", prefill=num_workers, decode=num_workers, port=0, local_prefill_max_tokens=0, log_level="warning"
    )
    with LocalDeployment.from_settings(settings, resolve_model("demo")) as deployment:
        deployment.wait_ready(timeout_s=600)
        yield Fleet(deployment, step_ms / 1e3, directory)


@click.command(help=__doc__)
@click.option("--workers", default=50, show_default=True, help="Prefill workers, and as many decode workers.")
@click.option("--step-ms", default=20.0, show_default=True, help="Time of a fake engine's step.")
@click.option("--seconds", default=60.0, show_default=True, help="How long the highest rate must be held.")
@click.option("--probe-seconds", default=12.0, show_default=True, help="Length of a trial while searching.")
@click.option("--start-rate", default=8.0, show_default=True, help="First rate tried.")
@click.option("--output", type=click.Path(path_type=Path), help="Where the figures go as JSON.")
def main(
    workers: int, step_ms: float, seconds: float, probe_seconds: float, start_rate: float, output: Path | None
) -> None:
    """Run it."""
    with tempfile.TemporaryDirectory() as directory:
        print(f"starting {workers} prefill and {workers} decode workers …", flush=True)
        with fleet_of(workers, step_ms, Path(directory)) as fleet:
            idle = fleet.idle_cores(5.0)
            sizes = ", ".join(f"{name} {size:.0f} MB" for name, size in fleet.memory_mb().items())
            print(f"memory: {sizes}; idle workers use {idle:.2f} cores in all", flush=True)
            best = highest_rate(fleet, start_rate, min(probe_seconds, seconds), seconds)
            limit = max(best.cores, key=lambda name: best.cores[name])
            num_cores = len(os.sched_getaffinity(0))
            print(
                f"held for {seconds:g} s: {best.rate:.1f} requests/s, {best.whole.output_tokens_per_s:.0f} streamed tokens/s "
                f"over {2 * workers} workers; {sum(best.cores.values()):.2f} of {num_cores} cores busy, most of it {limit}"
            )
            if output is not None:
                cpu = best.result.cpu
                figures = {
                    "date": datetime.now(UTC).isoformat(timespec="seconds"),
                    "cpu": None if cpu is None else msgspec.to_builtins(cpu), "warnings": best.result.warnings,
                    "workers": 2 * workers, "rate": best.rate, "tokens_per_s": best.whole.output_tokens_per_s,
                    "cores": best.cores, "idle_cores": idle, "memory_mb": fleet.memory_mb(), "seconds": seconds,
                    "environment": best.result.environment,
                }  # fmt: skip
                output.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
