"""A relay in one process: real workers on fake engines, real sockets, and a scripted gateway to talk to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import zmq
from prometheus_client import CollectorRegistry

from kvrelay.common.model_card import ModelCard
from kvrelay.common.sampling import FinishReason, SamplingParams
from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.decode_worker.worker import DecodeWorker
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings
from kvrelay.prefill_worker.worker import PrefillWorker
from kvrelay.wire.control.client import ControlClient
from kvrelay.wire.messages import (
    Cancelled,
    DecodeTarget,
    Failed,
    HandedOver,
    Hello,
    HelloRefused,
    Message,
    Preempted,
    Role,
    Status,
    Submit,
    Tokens,
    Welcome,
)
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.network import Network

from .workers import LINKS, OnStep, assert_nothing_held, decode_worker, prefill_worker

TIMEOUT_S = 30.0


class Link:
    """A gateway's link to one worker: everything it says lands in ``inbox``."""

    def __init__(self, address: str, peer_id: str, network: Network) -> None:
        self.inbox: asyncio.Queue[Message] = asyncio.Queue()
        self.up = asyncio.Event()
        self.lost = asyncio.Event()
        self.refused: HelloRefused | None = None
        self.client = ControlClient(
            address,
            Hello(role=Role.GATEWAY, peer_id=peer_id),
            self,
            LINKS,
            metrics=WireMetrics(CollectorRegistry()),
            network=network,
        )

    def on_welcome(self, welcome: Welcome) -> None:
        self.up.set()

    def on_message(self, message: Message) -> None:
        if not isinstance(message, Status):
            self.inbox.put_nowait(message)

    def on_lost(self, reason: str) -> None:
        self.lost.set()

    def on_refused(self, refused: HelloRefused) -> None:
        self.refused = refused
        self.up.set()


@dataclass
class Relay:
    """One prefill worker, one decode worker, one gateway with a link to each."""

    prefill: PrefillWorker
    decode: DecodeWorker
    prefill_registry: CollectorRegistry
    decode_registry: CollectorRegistry
    to_prefill: Link
    to_decode: Link
    context: zmq.Context[zmq.Socket[bytes]]
    backlog: list[Message] = field(default_factory=list)

    def submit(
        self,
        request_id: str,
        token_ids: Seq[int],
        sampling: SamplingParams | int,
        *,
        local: bool = False,
        attempt: int = 1,
    ) -> None:
        """Send a request: so many tokens, greedily, or as ``sampling`` says."""
        if isinstance(sampling, int):
            sampling = SamplingParams(max_tokens=sampling, temperature=0.0)
        message = Submit(
            request_id=request_id,
            attempt=attempt,
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            sampling=sampling,
            decode=None if local else DecodeTarget(address=self.decode.address),
        )
        assert (self.to_decode if local else self.to_prefill).client.send(message)

    async def failure(self, token_ids: Seq[int], max_tokens: int = 8) -> Failed:
        """That of a request which cannot end well; nothing of it is left."""
        self.submit("fails", token_ids, max_tokens)
        outcome = (await self.outcome("fails"))["fails"]
        assert isinstance(outcome, Failed)
        await self.settled()
        return outcome

    async def outcome(self, *request_ids: str) -> dict[str, list[int] | Message]:
        """Wait until every request ended; its output tokens, or the message that ended it otherwise."""
        outputs: dict[str, list[int]] = {request_id: [] for request_id in request_ids}
        ended: dict[str, list[int] | Message] = {}
        async with asyncio.timeout(TIMEOUT_S):
            readers = [asyncio.ensure_future(link.inbox.get()) for link in (self.to_prefill, self.to_decode)]
            try:
                while len(ended) < len(request_ids):
                    await asyncio.wait(readers, return_when=asyncio.FIRST_COMPLETED)
                    for index, link in enumerate((self.to_prefill, self.to_decode)):
                        if readers[index].done():
                            self._take(readers[index].result(), outputs, ended)
                            readers[index] = asyncio.ensure_future(link.inbox.get())
            finally:
                for reader in readers:
                    reader.cancel()
        return ended

    def _take(self, message: Message, outputs: dict[str, list[int]], ended: dict[str, list[int] | Message]) -> None:
        self.backlog.append(message)
        match message:
            case Tokens(items=items):
                for item in items:
                    output = outputs[item.request_id]
                    assert item.index <= len(output), f"a gap: {item} after {len(output)} tokens"
                    # The prefill worker's copy of the first token may come behind the decode worker's stream.
                    output += [token.token_id for token in item.tokens[len(output) - item.index :]]
                    if item.finish_reason is not None:
                        assert item.finish_reason is FinishReason.LENGTH
                        assert item.request_id not in ended, "two terminal replies"
                        ended[item.request_id] = output
            case Failed(request_id=request_id) | Cancelled(request_id=request_id):
                if request_id in outputs:
                    ended[request_id] = message
            case HandedOver() | Preempted():
                pass
            case _:
                raise AssertionError(f"unexpected {message}")

    async def settled(self) -> None:
        """Wait until no worker knows any request, then check that every block is free or cached."""
        async with asyncio.timeout(TIMEOUT_S):
            while self.prefill.service.entries or self.decode.service.entries:
                await asyncio.sleep(0.005)  # polling for a state, bounded by the timeout above
        assert_nothing_held(self.prefill)
        assert_nothing_held(self.decode)


@asynccontextmanager
async def relay(
    *,
    prefill_card: ModelCard | None = None,
    decode_card: ModelCard | None = None,
    prefill_settings: PrefillSchedulerSettings | None = None,
    decode_settings: DecodeSchedulerSettings | None = None,
    on_prefill_step: OnStep | None = None,
    on_decode_step: OnStep | None = None,
) -> AsyncIterator[Relay]:
    """A running relay on loopback; stopped and checked for leaks at the end."""
    prefill_registry, decode_registry = CollectorRegistry(), CollectorRegistry()
    decode = decode_worker(decode_registry, decode_card, on_decode_step, settings=decode_settings)
    prefill = prefill_worker(prefill_registry, prefill_card, on_prefill_step, settings=prefill_settings)
    network = Network.open()
    await decode.start()
    await prefill.start()
    to_prefill = Link(prefill.address, "gateway", network)
    to_decode = Link(decode.address, "gateway", network)
    try:
        for link in (to_prefill, to_decode):
            link.client.start()
            await asyncio.wait_for(link.up.wait(), TIMEOUT_S)
        yield Relay(prefill, decode, prefill_registry, decode_registry, to_prefill, to_decode, network)
    finally:
        for link in (to_prefill, to_decode):
            await link.client.stop()
        await prefill.stop()
        await decode.stop()
        await asyncio.to_thread(network.close)
