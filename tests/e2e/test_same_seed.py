"""The same seed gives the same text: alone, after preemptions in a full batch, and after a worker was killed.

The requests have penalties and a guide, whose state must be rebuilt, and several choices, each with its own noise.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import torch

from kvrelay.engine.backends.cpu.native import CpuKernels
from kvrelay.engine.backends.cpu.native.compiled import default_cache_dir
from kvrelay.engine.backends.cpu.native_ops import has_native_linear
from kvrelay.launcher.client import counter_values
from kvrelay.launcher.local.deployment import LocalDeployment

from .conftest import serving, wait_restarted, wait_until_idle
from .promises import Wish, ask_alone, ask_together
from .test_demo import http

pytestmark = pytest.mark.timeout(300)

NUM_BLOCKS = 12  # of each worker's pool: room for two of the answers below, but not for all
NUM_BEFORE = 8  # tokens of each choice that the client has before a worker is killed
DECODES = ("decode-0", "decode-1")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{4,9}$"},
        "numbers": {
            "type": "array",
            "items": {"type": "integer", "minimum": 100, "maximum": 9999},
            "minItems": 8,
            "maxItems": 8,
        },
        "is_big": {"type": "boolean"},
    },
    "required": ["name", "numbers", "is_big"],
    "additionalProperties": False,
}
WISHES = {
    "penalties": Wish(
        "Tell me a long story about a dragon and a dragon.",
        {
            "seed": 11, "temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.1, "presence_penalty": 0.8,
            "frequency_penalty": 0.4, "max_tokens": 64, "ignore_eos": True,
        },
    ),
    "json_schema": Wish(
        "A city in JSON: ",
        {"seed": 12, "temperature": 1.2, "max_tokens": 100, "structured_outputs": {"json": SCHEMA}},
    ),
    "n": Wish(
        "Once upon a time in a small village",
        {"seed": 13, "temperature": 1.0, "top_k": 50, "n": 4, "max_tokens": 64, "ignore_eos": True},
    ),
}  # fmt: skip

Told = list[tuple[str, list[int]]]  # the text and token ids of each choice


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    """The dtype of ``small``. In bf16 only our own kernels give batch-independent results (docs/reliability.md)."""
    name: str = request.param
    if name == "bfloat16":
        if shutil.which("g++") is None:
            pytest.skip("no g++")
        if not has_native_linear(CpuKernels.load(default_cache_dir()), torch.empty(2, 2)):
            pytest.skip("oneDNN multiplies on this CPU")
    return name


@pytest.fixture(scope="module")
def alone(dtype: str, deployment: LocalDeployment, small: LocalDeployment) -> dict[str, Told]:
    """The answers to one request at a time: in float32 from another deployment, in bf16 from ``small``."""
    answers = asyncio.run(ask_alone((deployment if dtype == "float32" else small).url, WISHES))
    return {name: [(one["text"], one["token_ids"]) for one in answer.choices] for name, answer in answers.items()}


@pytest.fixture(scope="module")
def small(dtype: str, model_directory: Path) -> Iterator[LocalDeployment]:
    """A prefill worker and two decode workers with few blocks."""
    with serving(model_directory, decode=2, dtype=dtype, num_blocks=NUM_BLOCKS) as running:
        yield running


def test_each_kind_is_what_it_should_be(alone: dict[str, Told]) -> None:
    [(document, _)] = alone["json_schema"]
    jsonschema.validate(json.loads(document), SCHEMA)
    assert len({text for text, _ in alone["n"]}) == 4
    assert all(len(token_ids) > 3 * NUM_BEFORE for told in alone.values() for _, token_ids in told)


class Stream:
    """One streamed request. ``told`` grows while it runs."""

    def __init__(self, name: str, wish: Wish) -> None:
        self.request_id = f"{name}-x"
        self.told: Told = [("", []) for _ in range(wish.num_choices)]
        self.is_under_way = asyncio.Event()  # every choice has at least ``NUM_BEFORE`` tokens
        self._body = {**wish.body, "stream": True}

    async def run(self, client: httpx.AsyncClient) -> None:
        """Read the stream to its end."""
        headers = {"x-request-id": self.request_id}
        async with client.stream("POST", "/v1/completions", json=self._body, headers=headers) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self._take(json.loads(line.removeprefix("data: ")))

    def _take(self, event: dict[str, Any]) -> None:
        assert "error" not in event, event
        [choice] = event["choices"]
        text, token_ids = self.told[choice["index"]]
        self.told[choice["index"]] = (text + choice["text"], token_ids + choice["token_ids"])
        if all(len(token_ids) >= NUM_BEFORE for _, token_ids in self.told):
            self.is_under_way.set()


def request_ids(deployment: LocalDeployment, worker: str) -> list[str]:
    """The ids of the requests that the worker has."""
    state: dict[str, Any] = httpx.get(f"{deployment.admin_urls[worker]}/debug/kv", timeout=30).json()
    return list(state["requests"])


async def in_hand(deployment: LocalDeployment) -> dict[str, list[str]]:
    """The ids of the requests that each decode worker has."""
    return {worker: await asyncio.to_thread(request_ids, deployment, worker) for worker in DECODES}


async def until_in_hand(deployment: LocalDeployment, stream: Stream, running: asyncio.Task[None]) -> None:
    """Wait until a decode worker has the request, or the request has ended."""
    while not running.done() and not any(
        key.startswith(stream.request_id) for keys in (await in_hand(deployment)).values() for key in keys
    ):
        await asyncio.sleep(0.005)  # polls; the test's timeout bounds it


async def test_after_preemption(small: LocalDeployment, alone: dict[str, Told]) -> None:
    """Each decode worker has two older, longer requests when the tested ones arrive. Together they need more than
    ``NUM_BLOCKS``, so the youngest is preempted. Each tested request still gives the same text."""
    # After answers of one token the gateway expects short answers, and admits more requests than fit.
    await ask_alone(small.url, {str(seed): Wish("Hi", {"max_tokens": 1}) for seed in range(3)})
    fields = {"max_tokens": 100, "ignore_eos": True}
    async with http(small) as client, asyncio.TaskGroup() as running:
        num_older = 0
        # Placement depends on the workers' reports, so more requests are sent until both workers have two.
        while min(len(ids) for ids in (await in_hand(small)).values()) < 2:
            assert num_older < 12, "all go to one worker, or end before others begin"
            stream = Stream(f"older-{num_older}", Wish(f"{num_older} bottles of beer", fields))
            await until_in_hand(small, stream, running.create_task(stream.run(client)))
            num_older += 1
        answers = await ask_together(small.url, WISHES)
    for name, answer in answers.items():
        assert [(one["text"], one["token_ids"]) for one in answer.choices] == alone[name], name
    for worker in DECODES:
        assert sum(counter_values(small.admin_urls[worker], "kvrelay_preemptions_total", {})) > 0, worker
    await asyncio.to_thread(wait_until_idle, small)


async def test_after_failover(small: LocalDeployment, alone: dict[str, Told]) -> None:
    """The decode worker with the most requests not yet struck is killed, again and again until each request was struck.
    Each gives the same text."""
    left = set(WISHES)
    async with http(small) as client:
        while left:
            streams = {name: Stream(name, WISHES[name]) for name in sorted(left)}
            running = [asyncio.create_task(stream.run(client)) for stream in streams.values()]
            await asyncio.gather(*(stream.is_under_way.wait() for stream in streams.values()))
            struck_by = {
                worker: {name for name, one in streams.items() if any(key.startswith(one.request_id) for key in keys)}
                for worker, keys in (await in_hand(small)).items()
            }
            victim = max(struck_by, key=lambda worker: len(struck_by[worker]))
            lost = small.pids[victim]
            if struck_by[victim]:  # else all have ended meanwhile, and are asked again
                os.kill(lost, signal.SIGKILL)
            await asyncio.gather(*running)
            assert {name: stream.told for name, stream in streams.items()} == {name: alone[name] for name in left}
            if struck_by[victim]:
                await asyncio.to_thread(wait_restarted, small, victim, lost)
            left -= struck_by[victim]
        gateway = small.admin_urls["gateway"]
        assert sum(counter_values(gateway, "kvrelay_attempts_total", {"outcome": "peer_lost"})) >= len(WISHES)
    await asyncio.to_thread(wait_until_idle, small)
