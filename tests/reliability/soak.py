"""Minutes of mixed load with many cancellations: the memory of no process may grow, and no block may stay held.

    python -m tests.reliability.soak [--seconds 600] [--seed 1] [--clients 8]

Clients send short and long prompts, stream or not, leave before the first token or during an answer, or send invalid requests.
Resident memory is read every few seconds. Its slope is the median of the slopes between all pairs of readings (Theil and Sen). The
first third is left out, because caches fill in it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from .fleet import Fleet, fleet

MAX_SLOPE_MIB_PER_MIN = 1.0
READ_EVERY_S = 2.0
MODEL_OPTIONS = ["--threads", "1", "--kv-memory-mb", "256", "--device", "cpu"]


@dataclass
class Report:
    """The figures of a run."""

    ends: Counter[str] = field(default_factory=Counter)
    readings: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # by member: seconds, MiB
    descriptors: dict[str, tuple[int, int]] = field(default_factory=dict)  # by member: before, after
    idle_after_s: float = 0.0

    def slopes(self) -> dict[str, float]:
        """The growth of each member in MiB per minute."""
        return {name: 60 * slope(readings[len(readings) // 3 :]) for name, readings in self.readings.items()}

    def problems(self, max_slope: float) -> list[str]:
        """All problems of the run; empty if there are none."""
        problems = [f"{name} grows by {one:.2f} MiB a minute" for name, one in self.slopes().items() if one > max_slope]
        for name, (before, after) in self.descriptors.items():
            if after > before + 8:
                problems.append(f"{name} has {after} descriptors open, had {before}")
        problems += [f"{count} x {end}" for end, count in self.ends.items() if end.startswith("bad")]
        return problems

    def lines(self) -> list[str]:
        """The report as lines of text."""
        lines = ["requests: " + ", ".join(f"{count} {end}" for end, count in sorted(self.ends.items()))]
        for name, per_minute in self.slopes().items():
            begun, ended = self.readings[name][0][1], self.readings[name][-1][1]
            before, after = self.descriptors[name]
            lines.append(
                f"{name}: {begun:.0f} MiB at the start, {ended:.0f} at the end, slope {per_minute:+.2f} MiB a minute; "
                f"descriptors {before}, then {after}"
            )
        lines.append(f"afterwards: every block free or cached after {self.idle_after_s:.1f} s")
        return lines


def slope(readings: Sequence[tuple[float, float]]) -> float:
    """The median of the slopes between all pairs of readings; 0 for fewer than two readings."""
    pairs = itertools.combinations(readings, 2)
    return statistics.median([(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs] or [0.0])


async def soak(model: Path, seconds: float, seed: int, *, num_clients: int, worker_options: list[str]) -> Report:
    """The whole run."""
    report = Report()
    with tempfile.TemporaryDirectory() as directory:
        async with fleet(
            Path(directory),
            model=model,
            num_prefills=1,
            num_decodes=1,
            num_gateways=1,
            worker_options=worker_options,
            gateway_options=[],
        ) as up:
            await _load(up, Report(), min(5.0, seconds / 2), seed, num_clients)
            before = await up.calm_figures()
            reader = asyncio.create_task(_read(up, report))
            await _load(up, report, seconds, seed + 1, num_clients)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            report.idle_after_s = await up.wait_idle(15.0)
            after = await up.calm_figures(before)
            for name, member in up.members.items():
                report.descriptors[name] = (before[name].num_descriptors, after[name].num_descriptors)
                assert not member.exit_codes, f"{name} ended by itself: {member.exit_codes}"
    return report


async def _read(up: Fleet, report: Report) -> None:
    begun_s = time.monotonic()
    while True:
        for name, member in up.members.items():
            figures = member.figures()
            report.readings.setdefault(name, []).append((time.monotonic() - begun_s, figures.rss_mib))
        await asyncio.sleep(READ_EVERY_S)


async def _load(up: Fleet, report: Report, seconds: float, seed: int, num_clients: int) -> None:
    until_s = time.monotonic() + seconds
    gateway = up.members["gateway-0"]
    limits = httpx.Limits(max_keepalive_connections=num_clients)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=120, limits=limits, trust_env=False) as http:

        async def client(index: int) -> None:
            chance = random.Random(1000 * seed + index)
            while time.monotonic() < until_s:
                report.ends[await _one(http, chance)] += 1

        await asyncio.gather(*(client(index) for index in range(num_clients)))


async def _one(http: httpx.AsyncClient, chance: random.Random) -> str:
    """Send a random request. Returns how it ended."""
    num_words = chance.choice([3, 20, 60, 200])
    words = " ".join(chance.choice(["sea", "light", "bread", "rain", "seven", "wind"]) for _ in range(num_words))
    body: dict[str, Any] = {
        "prompt": words,
        "max_tokens": chance.randrange(1, 40),
        "temperature": chance.choice([0.0, 0.8]),
        "seed": chance.randrange(1000),
    }
    match chance.randrange(10):
        case 0:
            answer = await http.post("/v1/completions", json=body | {"temperature": -1})
            return "refused" if answer.status_code == 400 else f"bad {answer.status_code} instead of 400"
        case 1 | 2 | 3:
            return await _leave(http, body, chance.uniform(0.0, 0.6), chance.randrange(0, 12))
        case 4 | 5:
            answer = await http.post("/v1/completions", json=body)
            return "whole" if answer.status_code == 200 else f"bad {answer.status_code}"
        case _:
            async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
                lines = [line async for line in response.aiter_lines() if line]
            return (
                "streamed" if lines[-1] == "data: [DONE]" and "error" not in lines[-2] else f"bad stream: {lines[-2:]}"
            )


async def _leave(http: httpx.AsyncClient, body: dict[str, Any], after_s: float, after_events: int) -> str:
    """Stream an answer, and close the connection after some time or some events."""
    num_events = 0
    try:
        async with asyncio.timeout(after_s):
            async with http.stream(
                "POST", "/v1/completions", json=body | {"stream": True, "max_tokens": 200}
            ) as response:
                async for _ in response.aiter_lines():
                    num_events += 1
                    if num_events > after_events:
                        break
    except TimeoutError:
        pass
    return "left"


def main() -> int:
    """Print the report. Returns 1 if there are problems."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=8)
    arguments = parser.parse_args()
    from kvrelay.launcher.models import resolve_model  # noqa: PLC0415 - its imports take a second

    report = asyncio.run(
        soak(
            resolve_model("demo"),
            arguments.seconds,
            arguments.seed,
            num_clients=arguments.clients,
            worker_options=MODEL_OPTIONS,
        )
    )
    problems = report.problems(MAX_SLOPE_MIB_PER_MIN)
    for line in [*report.lines(), *(f"FAILED: {problem}" for problem in problems)]:
        sys.stdout.write(line + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
