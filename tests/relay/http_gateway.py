"""All of kvrelay over HTTP in one process: the gateway's app on a real port, and real workers on fake engines behind it."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import uvicorn
from prometheus_client import CollectorRegistry

from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.decode_worker.worker import DecodeWorker
from kvrelay.engine.fake.engine import fake_card
from kvrelay.gateway.app import create_app
from kvrelay.gateway.main import make_http_server
from kvrelay.gateway.metrics import GatewayMetrics, Refusals
from kvrelay.gateway.settings import DiscoverySettings, GatewaySettings, RelaySettings, TraceSettings
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings
from kvrelay.prefill_worker.worker import PrefillWorker

from ..tokenizer_files import save_tokenizer
from .workers import LINKS, OnStep, assert_nothing_held, decode_worker, prefill_worker

VOCAB = 320
CHAT_TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}<|assistant|>"


def write_model(directory: Path) -> Path:
    """A model directory without weights: a byte-level tokenizer of ``VOCAB`` ids and a chat template."""
    text = "the quick brown fox jumps over the lazy dog, and then the dog jumps over the fox again and again"
    save_tokenizer(directory, VOCAB, ["<eos>"], text, CHAT_TEMPLATE)
    return directory


@dataclass
class Deployment:
    """A gateway, its URL and its two workers."""

    url: str
    client: httpx.AsyncClient
    prefill: PrefillWorker
    decode: DecodeWorker
    server: uvicorn.Server

    async def settled(self) -> None:
        """Wait until no worker knows any request, then check that every block is free or cached."""
        workers = [self.prefill, self.decode]
        async with asyncio.timeout(20):
            while any(worker.service.entries for worker in workers):
                await asyncio.sleep(0.005)  # polls for a state, bounded by the timeout above
        for worker in workers:
            assert_nothing_held(worker)

    async def metric(self, name: str) -> float:
        """The sum of all samples of a metric of the gateway."""
        lines = (await self.client.get("/metrics")).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


@asynccontextmanager
async def deployment(
    directory: Path,
    *,
    relay: RelaySettings | None = None,
    gate: OnStep | None = None,
    prefill_gate: OnStep | None = None,
    hands_over: bool = True,
    drain_s: float = 2,
    traces: TraceSettings | None = None,
    chunk_tokens: int | None = None,
) -> AsyncIterator[Deployment]:
    """A deployment that is ready; it is stopped afterwards. ``gate`` (decode) and ``prefill_gate`` see every step's rows.
    Without ``hands_over`` the gateway knows no prefill worker. ``chunk_tokens`` bounds the prompt tokens of a step."""
    card = fake_card(vocab_size=VOCAB, num_blocks=128)
    num_seqs = 64 if chunk_tokens is None else min(64, chunk_tokens)
    decode_settings = DecodeSchedulerSettings(max_batched_tokens=chunk_tokens, max_num_seqs=num_seqs)
    decode = decode_worker(None, card, gate, settings=decode_settings)
    prefill_settings = PrefillSchedulerSettings(max_batched_tokens=chunk_tokens)
    prefill = prefill_worker(None, card, prefill_gate, settings=prefill_settings)
    workers: Sequence[PrefillWorker | DecodeWorker] = [decode, prefill]
    for worker in workers:
        await worker.start()
    settings = GatewaySettings(
        relay=relay or RelaySettings(local_prefill="fallback", room_timeout_s=5.0),
        model=(str(directory),),
        served_model_name="tiny",
        workers=DiscoverySettings(
            prefill_workers=(prefill.address,) if hands_over else (), decode_workers=(decode.address,)
        ),
        max_body_bytes=100_000,
        traces=traces or TraceSettings(),
    )
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    metrics = GatewayMetrics(CollectorRegistry())
    app = create_app(settings, link_settings=LINKS, metrics=metrics)
    server = make_http_server(
        app, settings.http, Refusals(metrics.refused_connections, time.monotonic), drain_s=drain_s
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            async with asyncio.timeout(20):
                while not await _is_ready(client):
                    await asyncio.sleep(0.01)  # polls for a state, bounded by the timeout above
            yield Deployment(url, client, prefill, decode, server)
    finally:
        server.should_exit = True
        await serving
        for worker in reversed(workers):
            await worker.stop()


async def _is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health/ready")).status_code == 200
    except httpx.TransportError:
        return False
