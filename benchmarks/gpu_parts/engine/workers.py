"""A real prefill worker and a real decode worker, each a process with the whole model, and a client for both."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

from gateway_parts.direct_link import DirectLink
from handoff_parts.sides import heard
from prometheus_client import CollectorRegistry

from gpu_parts.engine.stepping import load_engine
from gpu_parts.frame.running import Context
from gpu_parts.frame.sizes import BLOCK_SIZE
from kvrelay.common.sampling import SamplingParams
from kvrelay.common.system import keep_freed_memory
from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.decode_worker.worker import DecodeWorker
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings
from kvrelay.prefill_worker.worker import PrefillWorker
from kvrelay.wire.lines.shared.place import SharedPlace
from kvrelay.wire.messages import DecodeTarget, Submit
from kvrelay.wire.network import Network
from kvrelay.wire.settings import LinkSettings
from kvrelay.worker.setup import Setup

# A device that loads or compiles for the first time may delay a worker beyond the usual timeouts.
_LINK = LinkSettings(peer_timeout_s=60.0, hello_timeout_s=60.0)
_ANSWER_S = 60.0
_NUM_TOKENS = 4  # tokens of an answer
_MAX_NUM_SEQS = 8
_KEPT_PROMPTS = 4  # room of the pools


@dataclass(frozen=True, slots=True)
class Room:
    """What both workers have room for."""

    max_num_seqs: int
    num_blocks: int  # of each pool


@dataclass(frozen=True, slots=True)
class Answer:
    """One request, on the asker's clock, in seconds from its sending."""

    first_s: float  # until its first token
    second_s: float
    transfer_s: float | None  # commit received until every block was verified, by the decode worker


def run_prefill_worker(connection: Connection, context: Context, room: Room | None = None) -> None:
    """A process: load, report the control address, serve, and end when the connection closes.

    ``room``: None: for one request after the other.
    """
    asyncio.run(_serve(connection, _load(context, room or _room_for_one(context), decodes=False)))


def run_decode_worker(connection: Connection, context: Context, room: Room | None = None) -> None:
    """The same for a decode worker."""
    asyncio.run(_serve(connection, _load(context, room or _room_for_one(context), decodes=True)))


def blocks_of(num_tokens: int) -> int:
    """The blocks of a sequence of ``num_tokens``."""
    return -(-num_tokens // BLOCK_SIZE)


def prompt_blocks(context: Context) -> int:
    """The blocks of some long prompts with their answers."""
    return _KEPT_PROMPTS * blocks_of(context.sizes.prefill_len + _NUM_TOKENS + 1)


def _room_for_one(context: Context) -> Room:
    return Room(_MAX_NUM_SEQS, prompt_blocks(context))


def _load(context: Context, room: Room, *, decodes: bool) -> Callable[[], PrefillWorker | DecodeWorker]:
    """Load the engine. Returns a function that makes the worker inside the event loop."""
    keep_freed_memory()
    max_num_seqs = room.max_num_seqs
    chunk = max(max_num_seqs, context.sizes.ttft_chunk) if decodes else context.sizes.ttft_chunk
    engine = load_engine(context, room.num_blocks, max_num_seqs=max_num_seqs, max_batched_tokens=chunk, decodes=decodes)

    def make() -> PrefillWorker | DecodeWorker:
        anywhere = "tcp://127.0.0.1:*"
        setup = Setup(
            "decode" if decodes else "prefill",
            time.time_ns(),
            anywhere,
            CollectorRegistry(),
            Network.open(),
            link_settings=_LINK,
            shared_memory=SharedPlace(),
        )
        if decodes:
            settings = DecodeSchedulerSettings(max_num_seqs=max_num_seqs, max_batched_tokens=chunk)
            return DecodeWorker(engine, settings, anywhere, setup)
        return PrefillWorker(engine, PrefillSchedulerSettings(max_batched_tokens=chunk), setup)

    return make


async def _serve(connection: Connection, make: Callable[[], PrefillWorker | DecodeWorker]) -> None:
    worker = make()
    await worker.start()
    try:
        connection.send(worker.address)
        await asyncio.to_thread(list, heard(connection))
    finally:
        await worker.stop()


class Asker:
    """Acts as a gateway. Requests may be asked at the same time."""

    def __init__(self, prefill: DirectLink, decode: DirectLink) -> None:
        self._prefill, self._decode = prefill, decode
        self._num_asked = 0

    async def ask(self, token_ids: list[int], *, is_local: bool, has_begun: asyncio.Event | None = None) -> Answer:
        """Ask with a hand-off, or only on the decode worker. Raises RuntimeError if it fails.

        ``has_begun`` is set when the first token has come.
        """
        submit = self._submit(token_ids, _NUM_TOKENS, is_local=is_local)
        begun_s = time.monotonic()
        first = self._decode if is_local else self._prefill
        assert first.client.send(submit), "the link is not up"
        first_s, delta = await first.next(submit.request_id)
        if has_begun is not None:
            has_begun.set()
        second_s, transfer_s = first_s, None
        num_tokens = len(delta.tokens) if is_local else 0  # the decode worker repeats the first token
        finished = delta.finish_reason if is_local else None
        while finished is None:
            at_s, delta = await self._decode.next(submit.request_id)
            before, num_tokens = num_tokens, num_tokens + len(delta.tokens)
            if before < 2 <= num_tokens:
                second_s = at_s
            if delta.timings is not None and delta.timings.transfer_s is not None:
                transfer_s = delta.timings.transfer_s
            finished = delta.finish_reason
        return Answer(first_s - begun_s, second_s - begun_s, transfer_s)

    async def stream(self, token_ids: list[int], num_tokens: int) -> AsyncIterator[float]:
        """Ask only the decode worker. Yields the monotonic time of each arrival. Raises RuntimeError if it fails."""
        submit = self._submit(token_ids, num_tokens, is_local=True)
        assert self._decode.client.send(submit), "the link is not up"
        finished = None
        while finished is None:
            at_s, delta = await self._decode.next(submit.request_id)
            yield at_s
            finished = delta.finish_reason

    def _submit(self, token_ids: list[int], num_tokens: int, *, is_local: bool) -> Submit:
        """A greedy request without stop tokens."""
        self._num_asked += 1
        return Submit(
            request_id=f"r{self._num_asked}",
            attempt=1,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            sampling=SamplingParams(max_tokens=num_tokens, temperature=0.0),
            decode=None if is_local else DecodeTarget(address=self._decode.client.address),
        )


@asynccontextmanager
async def asker(prefill_address: str, decode_address: str) -> AsyncIterator[Asker]:
    """Open links to both workers; closed at the end."""
    network = Network.open()
    links = [DirectLink(address, network, _LINK) for address in (prefill_address, decode_address)]
    try:
        for link in links:
            link.client.start()
        async with asyncio.timeout(_ANSWER_S):
            for link in links:
                await link.is_up.wait()
        yield Asker(*links)
    finally:
        for link in links:
            await link.client.stop()
        await asyncio.to_thread(network.close)
