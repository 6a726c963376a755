"""A real prefill worker and a real decode worker, each a process with the whole model, and whoever asks them for tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

from prometheus_client import CollectorRegistry
from sides import heard

from gpu_parts.running import Context
from gpu_parts.sizes import BLOCK_SIZE
from gpu_parts.stepping import load_engine
from kvrelay.common.memory import keep_freed_memory
from kvrelay.common.sampling import SamplingParams
from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.decode_worker.worker import DecodeWorker
from kvrelay.engine.loop import ModelLoop
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings
from kvrelay.prefill_worker.worker import PrefillWorker
from kvrelay.wire.control_client import ControlClient
from kvrelay.wire.messages import (
    Cancelled,
    DecodeTarget,
    Failed,
    Hello,
    HelloRefused,
    Message,
    Role,
    Submit,
    TokenDelta,
    Tokens,
    Welcome,
)
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.network import Network
from kvrelay.wire.settings import LinkSettings
from kvrelay.wire.shared_place import SharedPlace

# A device that loads or compiles for the first time may hold a worker up: that is no reason to give it up.
_LINK = LinkSettings(peer_timeout_s=60.0, hello_timeout_s=60.0)
_ANSWER_S = 60.0
_NUM_TOKENS = 4  # of an answer
_MAX_NUM_SEQS = 8
_KEPT_PROMPTS = 4  # the pools hold so many


@dataclass(frozen=True, slots=True)
class Answer:
    """One request, on the clock of who asked. Seconds from its sending."""

    first_s: float  # its first token was there
    second_s: float
    transfer_s: float | None  # commit received until every block was verified, as the decode worker says


def run_prefill_worker(connection: Connection, context: Context) -> None:
    """A process's whole life: load, serve, end when the connection closes. Tells its control address."""
    keep_freed_memory()
    chunk = context.sizes.ttft_chunk
    engine = load_engine(
        context, _num_blocks(context), max_num_seqs=_MAX_NUM_SEQS, max_batched_tokens=chunk, decodes=False
    )

    async def serve() -> None:
        worker = PrefillWorker(
            engine,
            PrefillSchedulerSettings(max_batched_tokens=chunk),
            "tcp://127.0.0.1:*",
            "prefill",
            CollectorRegistry(),
            network=Network.open(),
            model_loop=ModelLoop,
            epoch=time.time_ns(),
            link_settings=_LINK,
            shared_memory=SharedPlace(),
        )
        await _serve(worker, connection)

    asyncio.run(serve())


def run_decode_worker(connection: Connection, context: Context) -> None:
    """The same of a decode worker."""
    keep_freed_memory()
    chunk = max(_MAX_NUM_SEQS, context.sizes.ttft_chunk)
    engine = load_engine(
        context, _num_blocks(context), max_num_seqs=_MAX_NUM_SEQS, max_batched_tokens=chunk, decodes=True
    )

    async def serve() -> None:
        settings = DecodeSchedulerSettings(max_num_seqs=_MAX_NUM_SEQS, max_batched_tokens=chunk)
        worker = DecodeWorker(
            engine,
            settings,
            "tcp://127.0.0.1:*",
            "tcp://127.0.0.1:*",
            "decode",
            CollectorRegistry(),
            network=Network.open(),
            model_loop=ModelLoop,
            epoch=time.time_ns(),
            link_settings=_LINK,
            shared_memory=SharedPlace(),
        )
        await _serve(worker, connection)

    asyncio.run(serve())


async def _serve(worker: PrefillWorker | DecodeWorker, connection: Connection) -> None:
    await worker.start()
    try:
        connection.send(worker.address)
        await asyncio.to_thread(list, heard(connection))
    finally:
        await worker.stop()


@dataclass(frozen=True, slots=True)
class _Lost:
    """A worker is gone."""

    reason: str


class _Link:
    """A link to one worker. Implements ClientHandler."""

    def __init__(self, address: str, network: Network) -> None:
        self.inbox: asyncio.Queue[Message | _Lost] = asyncio.Queue()
        self.up = asyncio.Event()
        hello = Hello(role=Role.GATEWAY, peer_id="benchmark")
        metrics = WireMetrics(CollectorRegistry())
        self.client = ControlClient(address, hello, self, _LINK, metrics=metrics, network=network)

    def on_welcome(self, welcome: Welcome) -> None:
        self.up.set()

    def on_message(self, message: Message) -> None:
        if isinstance(message, Tokens | Failed | Cancelled):
            self.inbox.put_nowait(message)

    def on_lost(self, reason: str) -> None:
        self.inbox.put_nowait(_Lost(reason))

    def on_refused(self, refused: HelloRefused) -> None:
        self.inbox.put_nowait(refused)


class Asker:
    """Stands where the gateway stands: one request at a time."""

    def __init__(self, prefill: _Link, decode: _Link) -> None:
        self._prefill, self._decode = prefill, decode
        self._num_asked = 0

    async def ask(self, token_ids: list[int], *, is_local: bool) -> Answer:
        """A prompt, through the hand-off or on the decode worker alone. Raises RuntimeError if it fails."""
        self._num_asked += 1
        submit = Submit(
            request_id=f"r{self._num_asked}",
            attempt=1,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            sampling=SamplingParams(max_tokens=_NUM_TOKENS, temperature=0.0),
            decode=None if is_local else DecodeTarget(address=self._decode.client.address),
        )
        begun_s = time.perf_counter()
        first = self._decode if is_local else self._prefill
        assert first.client.send(submit), "the link is not up"
        first_delta = await self._delta(first, submit)
        first_s = time.perf_counter() - begun_s
        second_s, transfer_s = first_s, None
        num_tokens = len(first_delta.tokens) if is_local else 0  # the decode worker repeats the first one
        finished = first_delta.finish_reason if is_local else None
        while finished is None:
            delta = await self._delta(self._decode, submit)
            before, num_tokens = num_tokens, num_tokens + len(delta.tokens)
            if before < 2 <= num_tokens:
                second_s = time.perf_counter() - begun_s
            if delta.timings is not None and delta.timings.transfer_s is not None:
                transfer_s = delta.timings.transfer_s
            finished = delta.finish_reason
        return Answer(first_s, second_s, transfer_s)

    async def _delta(self, link: _Link, submit: Submit) -> TokenDelta:
        while True:
            async with asyncio.timeout(_ANSWER_S):
                message = await link.inbox.get()
            if not isinstance(message, Tokens):
                raise RuntimeError(f"no token came: {message}")
            for item in message.items:
                if item.request_id == submit.request_id:
                    return item


@asynccontextmanager
async def asker(prefill_address: str, decode_address: str) -> AsyncIterator[Asker]:
    """Links to both workers, up; closed at the end."""
    network = Network.open()
    links = [_Link(address, network) for address in (prefill_address, decode_address)]
    try:
        for link in links:
            link.client.start()
        async with asyncio.timeout(_ANSWER_S):
            for link in links:
                await link.up.wait()
        yield Asker(*links)
    finally:
        for link in links:
            await link.client.stop()
        await asyncio.to_thread(network.close)


def _num_blocks(context: Context) -> int:
    return _KEPT_PROMPTS * -(-(context.sizes.prefill_len + _NUM_TOKENS + 1) // BLOCK_SIZE)
