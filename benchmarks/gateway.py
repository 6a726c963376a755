"""The cost of the gateway: time added to each token, tokens per second with many streams, memory.

    .venv/bin/python benchmarks/gateway.py            # about two minutes
    .venv/bin/python benchmarks/gateway.py --help

*Added time* is measured on one clock: this process plays both the decode worker and the client. The worker has a real control
socket and sends one message every 20 ms, with a token of every running request. A token's time is from the departure of its message
until the client has it. The first token's time also includes the request's way from the client to the worker. The same is measured
without a gateway, with a client on the worker's control link. The added time is a token's time with the gateway, less the median
without it. Both are measured one after the other, ``--repeats`` times; the medians count.

*Throughput* uses real processes: a gateway, a decode worker with the fake engine, and ``kvrelay bench`` with 200 streams. The
worker is asked for more tokens than possible, and the CPU time of each component shows the bottleneck. ``--only-throughput`` leaves
the added time out.

*Traces* (``--traces``, about four minutes): only throughput, without traces and with a tenth of the requests traced, in turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
import httpx
import msgspec
import psutil
import uvloop
from gateway_parts.direct_link import DirectLink
from gateway_parts.ends import FIRST_MARK, PacedWorker, ask_directly, prompt_of
from gateway_parts.load import cpu_s, throughput, trace_cost

from kvrelay.launcher.bench.client import StreamingClient
from kvrelay.launcher.bench.summary import percentile
from kvrelay.launcher.local.ports import free_ports
from kvrelay.launcher.models import resolve_model
from kvrelay.wire.network import Network
from kvrelay.wire.settings import LinkSettings

STEP_S = 0.02  # time of the played worker's steps
LOAD_STREAMS = 200


@contextmanager
def gateway_process(worker_address: str, directory: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Run a gateway with one decode worker. Yields its URL and process."""
    (port,) = free_ports(1)
    arguments = ["--model", str(directory), "--port", str(port), "--decode-workers", worker_address]
    program = ["-P", "-m", "kvrelay.launcher", "gateway", "--log-level", "warning"]
    process = subprocess.Popen([sys.executable, *program, *arguments])
    try:
        yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(timeout=60)


@asynccontextmanager
async def playing(worker: PacedWorker) -> AsyncIterator[str]:
    """Run the played worker. Yields its address."""
    address = await worker.server.start()
    steps = asyncio.create_task(worker.run())
    try:
        yield address
    finally:
        steps.cancel()
        await asyncio.gather(steps, return_exceptions=True)
        await worker.server.stop()


@dataclass(frozen=True, slots=True)
class Load:
    """``streams`` requests at a time. Each stream sends ``rounds`` requests after one for warm-up."""

    streams: int
    rounds: int
    tokens: int
    step_s: float


Ask = Callable[
    [int, int], Awaitable[tuple[float, list[float]]]
]  # (mark, tokens) to (send time, arrival times of tokens)


async def measure_times(worker: PacedWorker, load: Load, ask: Ask) -> dict[str, list[float]]:
    """Seconds of each first token (both ways) and of each later token."""
    times: dict[str, list[float]] = {"first token": [], "later tokens": []}
    marks = itertools.count(FIRST_MARK)

    async def stream(place: int) -> None:
        pauses = random.Random(place)
        for number in range(load.rounds + 1):
            # A worker's step ends many requests at once, but users do not ask again at once.
            await asyncio.sleep(pauses.uniform(0, 10 * load.step_s))
            mark = next(marks)
            asked_s, came_s = await ask(mark, load.tokens)
            received_s, sent_s = worker.received_s[mark], worker.sent_s[mark]
            if len(came_s) != len(sent_s):
                raise SystemExit(f"{len(sent_s)} tokens were sent, {len(came_s)} came: they cannot be paired")
            if number:
                times["first token"].append(received_s - asked_s + came_s[0] - sent_s[0])
                times["later tokens"] += [came - sent for came, sent in zip(came_s[1:], sent_s[1:], strict=True)]

    await asyncio.gather(*(stream(place) for place in range(load.streams)))
    return times


async def measure_direct(load: Load) -> dict[str, list[float]]:
    """Measure times without a gateway."""
    network = Network.open()
    worker = PacedWorker(load.step_s, network)
    async with playing(worker) as address:
        link = DirectLink(address, network, LinkSettings())
        link.client.start()
        await link.is_up.wait()
        times = await measure_times(worker, load, functools.partial(ask_directly, link))
        await link.client.stop()
    network.close()
    return times


async def measure_gateway(directory: Path, load: Load) -> dict[str, list[float]]:
    """Measure times over HTTP, through a gateway."""
    network = Network.open()
    worker = PacedWorker(load.step_s, network)
    async with playing(worker) as worker_address:
        with gateway_process(worker_address, directory) as (url, process):
            await _ready(url)
            client = StreamingClient(url, "completions", timeout_s=60.0, clock=time.monotonic)

            async def ask(mark: int, tokens: int) -> tuple[float, list[float]]:
                answer = await client.ask(_body(mark, tokens))
                if answer.error is not None:
                    raise SystemExit(f"a request failed: {answer.error}: {answer.error_text}")
                return answer.sent_s, answer.chunk_s

            began_s, used_before_s, stolen_before_s = time.monotonic(), cpu_s(process), psutil.cpu_times().steal
            try:
                times = await measure_times(worker, load, ask)
            finally:
                await client.close()
            took_s = time.monotonic() - began_s
            cores = (cpu_s(process) - used_before_s) / took_s
            stolen = (psutil.cpu_times().steal - stolen_before_s) / took_s
            memory_mb = process.memory_info().rss / 2**20
            num_requests = load.streams * (load.rounds + 1)
            disturbed = f"the hypervisor took {stolen:.2f} cores"
            print(f"gateway: {cores:.2f} cores, {memory_mb:.0f} MB after {num_requests} requests; {disturbed}")
    network.close()
    return times


def _body(mark: int, tokens: int) -> bytes:
    body = {
        "prompt": prompt_of(mark), "max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 0,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    return msgspec.json.encode(body)


async def _ready(url: str) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get(f"{url}/health/ready")).status_code == 200:
                        return
                await asyncio.sleep(0.05)


@click.command(help=__doc__)
@click.option("--streams", default=8, show_default=True, help="Streams at a time while added time is measured.")
@click.option("--rounds", default=15, show_default=True, help="Requests of each of them.")
@click.option(
    "--repeats", default=3, show_default=True, help="How often added time, or the cost of traces, is measured."
)
@click.option("--load-seconds", default=20.0, show_default=True, help="How long.")
@click.option("--only-throughput", is_flag=True, help="Measure no added time.")
@click.option("--traces", is_flag=True, help="Measure what traces cost, and nothing else.")
def main(
    streams: int,
    rounds: int,
    repeats: int,
    load_seconds: float,
    only_throughput: bool,
    traces: bool,
) -> None:
    """Run it."""
    if traces:
        trace_cost(LOAD_STREAMS, load_seconds, repeats)
        return
    if not only_throughput:
        added_time(Load(streams, rounds, tokens=64, step_s=STEP_S), repeats)
    throughput(LOAD_STREAMS, load_seconds)


def added_time(pace: Load, repeats: int) -> None:
    """Measure and print the added time."""
    measured: dict[str, list[float]] = {}
    directory = resolve_model("demo", needs_weights=False)
    for _ in range(repeats):
        direct = uvloop.run(measure_direct(pace))
        through = uvloop.run(measure_gateway(directory, pace))
        for name in direct:
            for figure, value in added(name, direct[name], through[name]).items():
                measured.setdefault(figure, []).append(value)
    figures = {figure: statistics.median(values) for figure, values in measured.items()}
    print(f"{pace.streams} streams, median of {repeats}:")
    for name in ("first token", "later tokens"):
        shown = ", ".join(f"{q} {figures[f'{name} {q} ms']:.2f}" for q in ("p50", "p99", "max"))
        print(f"  added to {name}: {shown} ms; without a gateway it takes {figures[f'{name} direct ms']:.2f} ms")


def added(name: str, direct: Sequence[float], through: Sequence[float]) -> dict[str, float]:
    """The figures of one repeat for tokens of kind ``name``. ``direct``, ``through``: seconds without and with a gateway. Pure."""
    without_ms = statistics.median(direct) * 1e3
    ordered = sorted(value * 1e3 - without_ms for value in through)
    figures = {f"{name} {q} ms": percentile(ordered, share) for q, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}
    return {**figures, f"{name} direct ms": without_ms}


if __name__ == "__main__":
    main()
