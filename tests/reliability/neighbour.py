"""An honest client that streams answers through a fleet's gateway and checks every token, while others disturb the fleet."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import httpx

from kvrelay.engine.fake.language import expected_output

from ..relay.http_gateway import VOCAB, write_model
from .fleet import Fleet, fleet

ANSWER_S = 30.0
NUM_PROMPT, NUM_OUTPUT = 50, 12
WORKER_OPTIONS = ["--engine", "fake", "--fake-step-ms", "0", "--num-blocks", "512"]
# With one attempt a broken link becomes an error of the request instead of a delay.
GATEWAY_OPTIONS = ["--local-prefill", "fallback", "--max-attempts", "1", "--max-body-bytes", "100000"]

_T = TypeVar("_T")


class Neighbour:
    """Sends one request after another. ``latencies_s`` holds the times of the answers."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._numbers = random.Random(0)
        self.latencies_s: list[float] = []

    async def ask(self) -> None:
        """Send one request through both workers. Raises AssertionError if a token is wrong."""
        prompt = [self._numbers.randrange(VOCAB) for _ in range(NUM_PROMPT)]
        body = {"prompt": prompt, "max_tokens": NUM_OUTPUT, "temperature": 0, "ignore_eos": True, "stream": True}
        started_s = time.monotonic()
        async with self._client.stream("POST", "/v1/completions", json=body | {"return_token_ids": True}) as response:
            assert response.status_code == 200, await response.aread()
            # Bytes, because httpx's aiter_lines would also split at U+0085 and U+2028, which the text may contain.
            whole = b"".join([part async for part in response.aiter_bytes()])
        *events, done = [line.removeprefix(b"data: ") for line in whole.split(b"\n") if line]
        assert done == b"[DONE]", whole[-500:]
        answers = [json.loads(event) for event in events]
        assert not any("error" in answer for answer in answers), answers
        tokens = [token for answer in answers for token in answer["choices"][0]["token_ids"]]
        expected = expected_output(prompt, NUM_OUTPUT, VOCAB)
        assert tokens == expected, f"the neighbour got {tokens} instead of {expected}"
        self.latencies_s.append(time.monotonic() - started_s)

    async def beside(self, calls: Sequence[Callable[[], _T]]) -> list[_T]:
        """Run ``calls`` at the same time, each on a thread, while the neighbour sends requests. Returns their results."""
        with ThreadPoolExecutor(len(calls)) as threads:
            loop = asyncio.get_running_loop()
            running = asyncio.gather(*(loop.run_in_executor(threads, call) for call in calls))
            await self.ask()
            while not running.done():
                await self.ask()
            return await running

    def told(self) -> str:
        """The number of answers and their latencies, as text."""
        median_s, longest_s = statistics.median(self.latencies_s), max(self.latencies_s)
        return (
            f"{len(self.latencies_s)} honest answers, median {median_s * 1e3:.1f} ms, longest {longest_s * 1e3:.0f} ms"
        )


@asynccontextmanager
async def neighbour_of(up: Fleet) -> AsyncIterator[Neighbour]:
    """A new client that has had a first answer, so that all links are up."""
    async with httpx.AsyncClient(base_url=up.members["gateway-0"].url, timeout=ANSWER_S, trust_env=False) as client:
        neighbour = Neighbour(client)
        await neighbour.ask()
        yield neighbour


@asynccontextmanager
async def small_fleet(directory: Path, *, keys: Path | None = None, log_level: str = "info") -> AsyncIterator[Fleet]:
    """A gateway, a prefill and a decode worker on fake engines. Checks that none ends by itself or holds anything at the end."""
    model = directory / "model"
    model.mkdir()
    write_model(model)
    (model / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "max_position_embeddings": 4096}))
    async with fleet(
        directory,
        model=model,
        num_prefills=1,
        num_decodes=1,
        num_gateways=1,
        worker_options=[*WORKER_OPTIONS, "--log-level", log_level],
        gateway_options=GATEWAY_OPTIONS,
        keys=keys,
    ) as up:
        yield up
        await up.wait_idle(ANSWER_S)
        for member in up.members.values():
            assert not member.exit_codes, f"{member.name} ended by itself: {member.log.read_text()[-2000:]}"
