"""A gateway that asks real workers for one answer after another and knows what each must be: what a stranger must not disturb."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.fake import expected_output
from kvrelay.wire.authentication import ClientProof
from kvrelay.wire.control_client import ControlClient
from kvrelay.wire.keys import WireKeys
from kvrelay.wire.messages import (
    Cancelled,
    DecodeTarget,
    Failed,
    Hello,
    HelloRefused,
    Message,
    Role,
    Submit,
    Tokens,
    Welcome,
)
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.network import Network
from kvrelay.wire.settings import LinkSettings

from .worker_processes import VOCAB, Workers

ANSWER_S = 30.0
NUM_PROMPT, NUM_OUTPUT = 50, 12


class _Link:
    """One worker's link; what it says lands in a queue that both links share."""

    def __init__(self, inbox: asyncio.Queue[Message]) -> None:
        self._inbox = inbox
        self.up = asyncio.Event()
        self.num_lost = 0

    def on_welcome(self, welcome: Welcome) -> None:
        self.up.set()

    def on_message(self, message: Message) -> None:
        if isinstance(message, Tokens | Failed | Cancelled):
            self._inbox.put_nowait(message)

    def on_lost(self, reason: str) -> None:
        self.num_lost += 1

    def on_refused(self, refused: HelloRefused) -> None:
        self.num_lost += 1


@dataclass
class Neighbour:
    """Requests that were answered right, and how long each took."""

    clients: dict[Role, ControlClient]
    links: dict[Role, _Link]
    inbox: asyncio.Queue[Message]
    decode_address: str
    latencies_s: list[float] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def ask(self) -> None:
        """One request through both workers. Raises AssertionError if a single token is not what it must be."""
        number = next(self._numbers)
        prompt = [(number * 7 + position * 13) % VOCAB for position in range(NUM_PROMPT)]
        started_s = time.monotonic()
        submit = Submit(
            request_id=f"honest-{number}",
            attempt=1,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0),
            decode=DecodeTarget(address=self.decode_address),
        )
        assert self.clients[Role.PREFILL].send(submit), "the link to the prefill worker is down"
        output = await asyncio.wait_for(self._answer(submit.request_id), ANSWER_S)
        assert output == expected_output(prompt, NUM_OUTPUT, VOCAB), f"request {number}: wrong tokens {output}"
        self.latencies_s.append(time.monotonic() - started_s)

    async def ask_until(self, enough: asyncio.Event) -> None:
        """One after another, at least one."""
        while True:
            await self.ask()
            if enough.is_set():
                return

    def told(self) -> str:
        """How many, and how long they took."""
        longest_s, median_s = max(self.latencies_s), statistics.median(self.latencies_s)
        return (
            f"{len(self.latencies_s)} honest answers, median {median_s * 1e3:.1f} ms, longest {longest_s * 1e3:.0f} ms"
        )

    async def _answer(self, request_id: str) -> list[int]:
        output: list[int] = []
        while True:
            message = await self.inbox.get()
            assert isinstance(message, Tokens), f"not answered, but told {message}"
            for item in message.items:
                assert item.request_id == request_id, f"an answer to {item.request_id}"
                output += [token.token_id for token in item.tokens[max(0, len(output) - item.index) :]]
                if item.finish_reason is not None:
                    return output


@asynccontextmanager
async def neighbour_of(up: Workers) -> AsyncIterator[Neighbour]:
    """Connected to both workers, with the gateway's key if they have keys; no link may break before the end."""
    network = Network.open()
    inbox: asyncio.Queue[Message] = asyncio.Queue()
    metrics = WireMetrics(CollectorRegistry())
    links, clients = {}, {}
    for role, worker in ((Role.PREFILL, up.prefill), (Role.DECODE, up.decode)):
        links[role] = _Link(inbox)
        clients[role] = ControlClient(
            worker.address(),
            Hello(role=Role.GATEWAY, peer_id="honest-gateway"),
            links[role],
            LinkSettings(),
            metrics=metrics,
            network=network,
            proof=None if up.keys is None else ClientProof(WireKeys.load(up.keys, Role.GATEWAY), role),
        )
        clients[role].start()
    try:
        for role, link in links.items():
            await asyncio.wait_for(link.up.wait(), ANSWER_S)
            assert clients[role].is_up
        neighbour = Neighbour(clients, links, inbox, up.decode.address())
        await neighbour.ask()  # the link between the workers, too, is up before any stranger comes
        yield neighbour
        assert [link.num_lost for link in links.values()] == [0, 0], "an honest link broke"
    finally:
        for client in clients.values():
            await client.stop()
        await asyncio.to_thread(network.close)
