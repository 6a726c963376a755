"""What the gateway costs: time added to each token, tokens per second with many streams, memory.

    .venv/bin/python benchmarks/gateway.py            # about a minute
    .venv/bin/python benchmarks/gateway.py --help

*Added time* is measured on one clock: this process plays the decode worker (the real control socket; one message a step with a
token of every running request, every ``--step-ms``) and the HTTP client. A token's added time is from its message's departure
until its chunk has been read; the first token's also holds the way of the request, from its first byte until the worker has it.
So it contains ZeroMQ, loopback and this client, not only the gateway.

*Throughput* is real processes: one gateway, one decode worker with the fake engine, ``kvrelay bench`` with 200 streams that
ask for more than can be had. CPU time by component tells what limits it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import click
import httpx
import msgspec
import psutil
import uvloop
import zmq
from prometheus_client import CollectorRegistry

from kvrelay.common.sampling import FinishReason, SampledToken
from kvrelay.engine.fake import fake_card
from kvrelay.launcher.bench.client import Answer, StreamingClient
from kvrelay.launcher.bench.http_stream import HttpStreams, ServerAddress
from kvrelay.launcher.bench.records import read_result
from kvrelay.launcher.bench.summary import percentile, summarize
from kvrelay.launcher.local import LocalDeployment
from kvrelay.launcher.models import resolve_model
from kvrelay.launcher.ports import free_ports
from kvrelay.launcher.settings import LocalSettings
from kvrelay.wire.control import ControlServer
from kvrelay.wire.messages import (
    Hello,
    HelloRefused,
    Message,
    Role,
    Status,
    Submit,
    TokenDelta,
    Tokens,
    Welcome,
    WorkerState,
)
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.settings import LinkSettings

VOCAB_SIZE = 49_152
FIRST_MARK = 1000  # requests are told apart by their prompt's first token


class PacedWorker:
    """A decode worker on a real control socket: a token for every running request, every ``step_s``. Implements ServerHandler."""

    def __init__(self, step_s: float, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.received_s: dict[int, float] = {}  # by the request's mark
        self.sent_s: dict[int, list[float]] = {}
        self._step_s = step_s
        self._running: dict[int, Submit] = {}
        self._waiting: list[list[float]] = []  # where the moment of the next message is to be noted
        self._gateway = ""
        metrics = WireMetrics(CollectorRegistry())
        self.server = ControlServer("tcp://127.0.0.1:*", self, LinkSettings(), metrics=metrics, context=context)

    def welcome(self, hello: Hello) -> Welcome | HelloRefused:
        """Everybody is welcome."""
        card = fake_card(num_blocks=4096, block_size=16, vocab_size=VOCAB_SIZE)
        return Welcome(role=Role.DECODE, worker_id="paced", epoch=1, protocol=1, card=card)

    def status(self) -> Status:
        """Always room."""
        return Status(
            state=WorkerState.READY,
            num_running=len(self._running),
            num_waiting=0,
            num_waiting_tokens=0,
            num_free_blocks=4096,
            num_blocks=4096,
        )

    def on_message(self, peer_id: str, role: Role, message: Message) -> None:
        """Take requests."""
        self._gateway = peer_id
        if isinstance(message, Submit):
            mark = message.token_ids[0]
            self.received_s[mark] = time.monotonic()
            self._running[mark] = message
            self.sent_s[mark] = []

    def on_peer_lost(self, peer_id: str, role: Role) -> None:
        """The end of the run."""

    async def run(self) -> None:
        """Steps, until cancelled."""
        while True:
            started_s = time.monotonic()
            items = [self._next_token(mark, submit) for mark, submit in list(self._running.items())]
            if items:
                now_s = time.monotonic()
                for sent in self._waiting:
                    sent.append(now_s)
                self._waiting.clear()
                self.server.send(self._gateway, Tokens(items=items))
            await asyncio.sleep(max(0.0, started_s + self._step_s - time.monotonic()))

    def _next_token(self, mark: int, submit: Submit) -> TokenDelta:
        sent = self.sent_s[mark]
        index = len(sent)
        is_last = index + 1 == submit.sampling.max_tokens
        if is_last:
            del self._running[mark]
        self._waiting.append(sent)
        return TokenDelta(
            request_id=submit.request_id,
            attempt=submit.attempt,
            index=index,
            tokens=[SampledToken(2000 + (37 * index + mark) % 15_000)],
            finish_reason=FinishReason.LENGTH if is_last else None,
        )


@contextmanager
def gateway_process(worker_address: str, directory: Path) -> Iterator[tuple[str, psutil.Process]]:
    """A gateway with one decode worker; its URL and process."""
    (port,) = free_ports(1)
    arguments = ["--model", str(directory), "--port", str(port), "--decode-workers", worker_address]
    command = [sys.executable, "-P", "-m", "kvrelay.launcher", "gateway", "--log-level", "warning", *arguments]
    process = subprocess.Popen(command)
    try:
        yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(timeout=60)


@asynccontextmanager
async def playing(worker: PacedWorker) -> AsyncIterator[str]:
    """The worker, up; its address."""
    address = await worker.server.start()
    steps = asyncio.create_task(worker.run())
    try:
        yield address
    finally:
        steps.cancel()
        await asyncio.gather(steps, return_exceptions=True)
        await worker.server.stop()


async def measure_added(
    directory: Path, streams: int, rounds: int, tokens: int, step_s: float
) -> dict[str, list[float]]:
    """Seconds added to first tokens and to later ones; ``streams`` requests at a time, ``rounds`` each after a warm-up round."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    worker = PacedWorker(step_s, context)
    added: dict[str, list[float]] = {"first token": [], "later tokens": []}
    async with playing(worker) as worker_address:
        with gateway_process(worker_address, directory) as (url, process):
            await _ready(url)
            http = HttpStreams(ServerAddress(url), {})
            client = StreamingClient(http, "completions", timeout_s=60.0, clock=time.monotonic)
            marks = itertools.count(FIRST_MARK)

            async def stream(place: int) -> None:
                pauses = random.Random(place)
                for number in range(rounds + 1):
                    # The worker's steps end many requests at the same moment; their users do not ask again in the same one.
                    await asyncio.sleep(pauses.uniform(0, 10 * step_s))
                    mark = next(marks)
                    answer = await client.ask(_body(mark, tokens), on_chunk=lambda: None)
                    if answer.error is not None:
                        raise SystemExit(f"a request failed: {answer.error}: {answer.error_text}")
                    if number:
                        _note(added, answer, worker.received_s[mark], worker.sent_s[mark])

            try:
                await asyncio.gather(*(stream(place) for place in range(streams)))
            finally:
                await http.close()
            print(f"gateway memory after {streams * (rounds + 1)} requests: {process.memory_info().rss / 2**20:.0f} MB")
    context.term()
    return added


def _note(added: dict[str, list[float]], answer: Answer, received_s: float, sent_s: list[float]) -> None:
    if len(answer.chunk_s) != len(sent_s):
        raise SystemExit(f"{len(sent_s)} tokens were sent, {len(answer.chunk_s)} chunks came: they cannot be paired")
    added["first token"].append(received_s - answer.sent_s + answer.chunk_s[0] - sent_s[0])
    added["later tokens"] += [chunk - sent for chunk, sent in zip(answer.chunk_s[1:], sent_s[1:], strict=True)]


def _body(mark: int, tokens: int) -> bytes:
    prompt = [mark, *range(2000, 2127)]
    body = {
        "prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 0,
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


def measure_throughput(streams: int, seconds: float, step_ms: float) -> dict[str, float]:
    """Streamed tokens per second with a fake decode worker, and what each process used of the CPU."""
    os.environ |= {
        "KVRELAY_FAKE_STEP_MS": f"{step_ms:g}", "KVRELAY_FAKE_TOKEN_US": "0", "KVRELAY_FAKE_TOKEN_BYTES": "64",
        "KVRELAY_MAX_NUM_SEQS": f"{streams + 56}",
    }  # fmt: skip
    settings = LocalSettings(engine="fake", prefill=0, decode=1, port=0, log_level="warning")
    with (
        tempfile.TemporaryDirectory() as directory,
        LocalDeployment.from_settings(settings, resolve_model("demo")) as deployment,
    ):
        deployment.wait_ready(timeout_s=60)
        processes = {name: psutil.Process(pid) for name, pid in deployment.pids.items()}
        output = Path(directory) / "result.json"
        command = [
            sys.executable, "-P", "-m", "kvrelay.launcher", "bench", "--url", deployment.url, "--concurrency", str(streams),
            "--input-len", "32", "--output-len", "256", "--duration-s", str(seconds), "--output", str(output),
        ]  # fmt: skip
        before = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if not output.exists():
            raise SystemExit(f"the generator failed: {ended.stderr[-2000:]}")
        after = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
        memory_mb = processes["gateway"].memory_info().rss / 2**20
        result = read_result(output)
    whole = summarize(result).all
    if whole.num_ok != whole.num_requests:
        raise SystemExit(f"{whole.num_requests - whole.num_ok} requests failed: {whole.errors}")
    num_tokens = sum(request.output_tokens for request in result.requests)
    figures = {
        "tokens_per_s": whole.output_tokens_per_s,
        "gateway_us_per_token": (after["gateway"] - before["gateway"]) / num_tokens * 1e6,
        "worker_us_per_token": (after["decode-0"] - before["decode-0"]) / num_tokens * 1e6,
        "gateway_mb": memory_mb,
    }
    if result.cpu is not None:
        figures |= {"generator_cores": result.cpu.generator, "other_cores": result.cpu.others + result.cpu.stolen}
    return figures


@click.command(help=__doc__)
@click.option("--streams", default=8, show_default=True, help="Streams at a time while added time is measured.")
@click.option("--rounds", default=15, show_default=True, help="Requests of each of them.")
@click.option("--step-ms", default=20.0, show_default=True, help="Pace of the played worker.")
@click.option("--load-streams", default=200, show_default=True, help="Streams at a time while throughput is measured.")
@click.option("--load-step-ms", default=5.0, show_default=True, help="Pace of the fake worker then.")
@click.option("--load-seconds", default=20.0, show_default=True, help="How long.")
@click.option("--output", type=click.Path(path_type=Path), help="Where the figures go as JSON.")
def main(
    streams: int,
    rounds: int,
    step_ms: float,
    load_streams: int,
    load_step_ms: float,
    load_seconds: float,
    output: Path | None,
) -> None:
    """Run it."""
    added = uvloop.run(measure_added(resolve_model("demo", needs_weights=False), streams, rounds, 64, step_ms * 1e-3))
    figures: dict[str, float] = {}
    for name, values in added.items():
        ordered = sorted(values)
        found = {q: percentile(ordered, share) * 1e3 for q, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}
        figures |= {f"{name} {q} ms": value for q, value in found.items()}
        shown = ", ".join(f"{q} {value:.2f}" for q, value in found.items())
        print(f"added to {name} ({streams} streams, {len(ordered)} tokens): {shown} ms", flush=True)
    load = measure_throughput(load_streams, load_seconds, load_step_ms)
    figures |= load
    print(
        f"{load_streams} streams: {load['tokens_per_s']:.0f} tokens/s; gateway {load['gateway_us_per_token']:.1f} us per token "
        f"and {load['gateway_mb']:.0f} MB, worker {load['worker_us_per_token']:.1f} us; "
        f"generator {load.get('generator_cores', float('nan')):.2f} cores"
    )
    if output is not None:
        output.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
