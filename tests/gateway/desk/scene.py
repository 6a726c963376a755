"""A gateway on a real port in front of workers that play a script, for tests of the console."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from kvrelay.common.sampling import FinishReason
from kvrelay.engine.fake.engine import fake_card
from kvrelay.gateway.app import create_app
from kvrelay.gateway.settings import DiscoverySettings, GatewaySettings, RelaySettings
from kvrelay.gateway.text.tokenizer import Tokenizer
from kvrelay.wire.messages import Hello, Message, Role, Status, Submit, Timings, Welcome
from kvrelay.wire.network import Network
from kvrelay.wire.settings import LinkSettings

from ..http_app import CHAT, http_only, lifespan, tokens_of
from ..http_port import serving
from ..players import LINKS, Player

SAID = "one relay hands the baton to the next one, and the next one runs"
NUM_BLOCKS = 4096


class Worker(Player):
    """A worker that answers every request with ``SAID``, a token at a time."""

    def __init__(
        self, role: Role, network: Network, number: int, *, pace_s: float = 0.02, links: LinkSettings = LINKS
    ) -> None:
        super().__init__(role, Worker.play, network, fake_card(vocab_size=300, num_blocks=NUM_BLOCKS), links)
        self.number = number
        self.pace_s = pace_s
        self.num_waiting = 0
        self.is_there = True

    def welcome(self, hello: Hello) -> Welcome:
        return Welcome(role=self.role, worker_id=f"{self.role}-{self.number}", epoch=1, protocol=1, card=self.card)

    def status(self) -> Status:
        return Status(
            state=self.state, num_running=self.num_running, num_waiting=self.num_waiting, num_blocks=NUM_BLOCKS,
            num_waiting_tokens=self.num_waiting_tokens, num_free_blocks=self.num_free_blocks, max_running=16,
            prompt_tokens_per_s=25_000.0 if self.role is Role.PREFILL else None,
        )  # fmt: skip

    def play(self, submit: Submit) -> None:
        sampled = tokens_of(self.tokenizer, SAID)[: submit.sampling.max_tokens]
        loop = asyncio.get_running_loop()
        timings = Timings(
            queue_s=0.4 * self.pace_s, prefill_s=2 * self.pace_s, transfer_s=0.3 * self.pace_s, first_step_s=self.pace_s
        )
        for index, token in enumerate(sampled):
            is_last = index + 1 == len(sampled)
            at_s = (4 + index + 6 * (index > len(sampled) // 2)) * self.pace_s
            end = FinishReason.STOP if is_last else None
            told = None if index else timings
            loop.call_later(at_s, partial(self.tokens, submit, index, [token], end, timings=told))

    def say(self, message: Message) -> None:
        if self.is_there:  # else its server has stopped
            self.server.send(Role.GATEWAY, self.gateway_id, message)

    async def leave(self) -> None:
        """Stop the worker, if it still runs."""
        if self.is_there:
            self.is_there = False
            await self.server.stop()


@dataclass
class Scene:
    """A gateway, its workers and a client."""

    url: str
    client: httpx.AsyncClient
    server: uvicorn.Server
    workers: list[Worker]
    key: str | None
    is_ending: bool = False  # set at the end, so that the console's streams end

    async def ask(self, number: int, **body: Any) -> list[httpx.Response]:
        """Send ``number`` chats at the same time."""
        said = {"messages": [{"role": "user", "content": "hand over " * 9}], **body}
        headers = {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        return await asyncio.gather(*[self.client.post(CHAT, json=said, headers=headers) for _ in range(number)])

    @asynccontextmanager
    async def asking(self, number: int) -> AsyncIterator[None]:
        """Send ``number`` chats at a time, again and again. All must get a 200."""
        is_over = False

        async def ask() -> None:
            while not is_over:
                assert {answer.status_code for answer in await self.ask(number)} == {200}

        async with asyncio.TaskGroup() as group:
            group.create_task(ask())
            yield
            is_over = True


@asynccontextmanager
async def scene(
    directory: Path,
    num_prefill: int,
    num_decode: int,
    *,
    pace_s: float = 0.02,
    api_keys: str | None = None,
    key: str | None = None,
) -> AsyncIterator[Scene]:
    network = Network.open()
    roles = [Role.PREFILL] * num_prefill + [Role.DECODE] * num_decode
    workers = [Worker(role, network, number, pace_s=pace_s) for number, role in enumerate(roles)]
    tokenizer = Tokenizer.load(directory)
    for worker in workers:
        worker.tokenizer, worker.address = tokenizer, await worker.server.start()
    addresses = [tuple(one.address for one in workers if one.role is role) for role in (Role.PREFILL, Role.DECODE)]
    settings = GatewaySettings(
        relay=RelaySettings(local_prefill="fallback"),
        model=(str(directory),),
        served_model_name="tiny",
        workers=DiscoverySettings(prefill_workers=addresses[0], decode_workers=addresses[1]),
        api_keys=api_keys,
    )
    made: Scene
    app = create_app(settings, link_settings=LINKS, is_ending=lambda: made.is_ending)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, network.close)
        for worker in workers:
            stack.push_async_callback(worker.leave)
        await stack.enter_async_context(lifespan(app))
        port = await stack.enter_async_context(serving(http_only(app)))
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port.number}", timeout=60)
        )
        async with asyncio.timeout(20):
            while (await client.get("/health/ready")).status_code != 200:
                await asyncio.sleep(0.005)  # polls for a state, bounded
        made = Scene(f"http://127.0.0.1:{port.number}", client, port.server, workers, key)
        yield made
        made.is_ending = True
