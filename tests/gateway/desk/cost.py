"""The cost of open consoles to a gateway in its own process, measured in turns with and without them, beside played workers.

PYTHONPATH=. .venv/bin/python -m tests.gateway.desk.cost MODEL_DIRECTORY [--workers 100] [--requests 1000]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path

import httpx
import psutil

from kvrelay.gateway.text.tokenizer import Tokenizer
from kvrelay.launcher.local.ports import free_ports
from kvrelay.wire.messages import Role
from kvrelay.wire.network import Network
from kvrelay.wire.settings import LinkSettings

from .scene import Worker

TURN_S = 15.0
NUM_CONSOLES = 10


async def look(client: httpx.AsyncClient, num_bytes: list[int]) -> None:
    """Follow the feed as one console does."""
    async with client.stream("GET", "/debug/live") as answer:
        async for part in answer.aiter_bytes():
            num_bytes[0] += len(part)


async def measure(client: httpx.AsyncClient, gateway: psutil.Process, num_consoles: int) -> str:
    """Measure the gateway's load with some consoles for ``TURN_S``."""

    def cpu_s() -> float:
        times = gateway.cpu_times()
        return float(times.user + times.system)

    num_bytes = [0]
    looking = [asyncio.create_task(look(client, num_bytes)) for _ in range(num_consoles)]
    await asyncio.sleep(2)  # until all consoles have begun
    bytes_before, cpu_before_s, begun_s = num_bytes[0], cpu_s(), time.monotonic()
    await asyncio.sleep(TURN_S)
    took_s = time.monotonic() - begun_s
    share, speed = (cpu_s() - cpu_before_s) / took_s, (num_bytes[0] - bytes_before) / took_s / max(1, num_consoles)
    for task in looking:
        task.cancel()
    await asyncio.gather(*looking, return_exceptions=True)
    return f"{num_consoles:2d} consoles: {share:6.2%} of a core, {speed:5.0f} bytes a second to each"


async def main(model: Path, num_workers: int, num_requests: int) -> None:
    network, tokenizer = Network.open(), Tokenizer.load(model)
    roles = [Role.PREFILL if number % 2 else Role.DECODE for number in range(num_workers)]
    workers = [Worker(role, network, number, links=LinkSettings()) for number, role in enumerate(roles)]
    for worker in workers:
        worker.tokenizer, worker.address = tokenizer, await worker.server.start()
        worker.script = lambda _player, _submit: None  # requests never end
    listed = {role: ",".join(one.address for one in workers if one.role is role) for role in Role}
    [port] = free_ports(1)
    flags = (f"--model={model}", f"--port={port}", "--local-prefill=fallback", f"--max-queued={num_requests + 1}")
    lists = (f"--prefill-workers={listed[Role.PREFILL]}", f"--decode-workers={listed[Role.DECODE]}")
    command = (sys.executable, "-m", "kvrelay.launcher", "gateway", *flags, *lists, "--log-level=error")
    gateway = await asyncio.create_subprocess_exec(*command, env={**os.environ, "PYTHONSAFEPATH": "1"})
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=600, limits=limits) as client:
        while True:
            try:
                if (await client.get("/health/ready")).status_code == 200:
                    break
            except httpx.TransportError:
                await asyncio.sleep(0.1)
        body = {"prompt": "hand over " * 20, "max_tokens": 8}
        asked = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(num_requests)]
        await asyncio.sleep(5)  # until all requests have arrived
        for _ in range(3):
            for num_consoles in (0, NUM_CONSOLES):
                print(await measure(client, psutil.Process(gateway.pid), num_consoles), flush=True)  # noqa: T201 - what it is for
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    gateway.terminate()
    await gateway.wait()
    for worker in workers:
        await worker.leave()
    await asyncio.to_thread(network.close)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--requests", type=int, default=0)
    given = parser.parse_args()
    asyncio.run(main(given.model, given.workers, given.requests))
