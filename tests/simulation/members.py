"""The members of a world, each in its own process, and the clients of its gateways."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from kvrelay.common.sampling import SamplingParams, Watermark
from kvrelay.decode_worker.draft_model import DraftModel
from kvrelay.decode_worker.worker import DecodeWorker
from kvrelay.engine.fake.language import expected_output
from kvrelay.gateway.errors import ApiError
from kvrelay.gateway.relay.relay import Relay
from kvrelay.gateway.relay.request import GenerationRequest, RequestTimings
from kvrelay.gateway.workers.pool import WorkerPool
from kvrelay.wire.messages import TokenDelta

from .clock import Process, ProcessState
from .machines import VOCAB, SimWorker
from .ranks import RankedSimEngine

STOPS = tuple(range(0, VOCAB, 20))  # tokens that end an output


@dataclass
class Client:
    """One request, its tokens and its outcome."""

    gateway: str  # its process
    prompt: list[int]
    max_tokens: int
    defers: bool = False  # the sampling of steps that run ahead, until the tokens in front are known
    tokens: list[int] = field(default_factory=list)
    outcome: str | None = None  # finished, cancelled, or an error's code; None: not over, or lost with its gateway
    num_ends: int = 0
    is_gone: bool = False
    task: asyncio.Task[None] | None = None

    def begin(self, relay: Relay, request_id: str, now_s: float) -> None:
        """Send the request, unless the client has left."""
        if not self.is_gone:
            self.task = asyncio.ensure_future(self._ask(relay, request_id, now_s))
            self.task.add_done_callback(self._on_done)

    def leave(self) -> None:
        """The client waits no longer."""
        self.is_gone = True
        if self.task is None:
            self.outcome = self.outcome or "cancelled"
        elif self.outcome is None:
            self.task.cancel()

    @property
    def expected(self) -> list[int]:
        """The tokens that any worker must generate."""
        output = expected_output(self.prompt, self.max_tokens, VOCAB)
        stop = next((place for place, token in enumerate(output) if token in STOPS), len(output))
        return output[: stop + 1]

    def check(self) -> None:
        """Check that the request has ended once, and that its tokens are right."""
        what = f"{self.outcome} after {len(self.tokens)} of {self.max_tokens} tokens"
        assert self.tokens == self.expected[: len(self.tokens)], f"a wrong token: {what}"
        assert self.outcome is not None, f"no end: {what}"
        assert self.num_ends <= 1, f"{self.num_ends} ends: {what}"
        if self.outcome == "finished":
            assert self.tokens == self.expected, what

    async def _ask(self, relay: Relay, request_id: str, now_s: float) -> None:
        sampling = SamplingParams(
            max_tokens=self.max_tokens,
            temperature=0.0,
            stop_token_ids=STOPS,
            watermark=Watermark() if self.defers else None,  # which changes no token of a fake engine
        )
        try:
            await relay.run(GenerationRequest(request_id, self.prompt, sampling, RequestTimings(now_s)), self._take)
        except ApiError as error:
            self.outcome = error.code
            self.num_ends += 1

    def _take(self, delta: TokenDelta) -> bool:
        self.tokens += [token.token_id for token in delta.tokens]
        if delta.finish_reason is not None:
            self.outcome = "finished"
            self.num_ends += 1
        return True

    def _on_done(self, task: asyncio.Task[None]) -> None:
        """The task has ended, perhaps before it began. An exception is one of the loop's problems."""
        if task.cancelled():
            self.outcome = self.outcome or "cancelled"


@dataclass
class Member:
    """A process of the world, and the worker or gateway in it."""

    process: Process
    worker: SimWorker | None = None
    ranks: RankedSimEngine | None = None
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    pool: WorkerPool | None = None
    relay: Relay | None = None
    is_draining: bool = False

    @property
    def draft_model(self) -> DraftModel | None:
        """That of a decode worker which has one."""
        return self.worker.draft_model if isinstance(self.worker, DecodeWorker) else None

    def check_books(self) -> None:
        """Check that the worker's books of its blocks agree."""
        if self.worker is not None:
            self.worker.blocks.check_integrity()
        if self.draft_model is not None:
            self.draft_model.check_integrity()
            assert not self.registry.get_sample_value("kvrelay_draft_model_failures_total")

    def left_over(self) -> list[str]:
        """What the process still holds of requests, unless it is dead, or a worker that is stopped."""
        name, state = self.process.member, self.process.state
        left: list[str] = []
        if self.pool is not None and state is not ProcessState.DEAD:
            left += [f"{name} waits for {key}" for key in self.pool._listeners]
            left += [
                f"{name} counts {one.load.attempts} at {one.address}"
                for one in self.pool.workers
                if one.load is not None and one.load.attempts
            ]
        if self.worker is not None and state is ProcessState.RUNNING:
            if self.worker.service.entries:
                left.append(f"{name} still has {self.worker.service.debug()}")
            ledger = self.worker.blocks.ledger()
            if ledger.num_free + ledger.num_cached != ledger.num_blocks:
                left.append(f"{name}: {ledger}")
            if self.draft_model is not None and (owners := self.draft_model.blocks.owners()):
                left.append(f"{name}: its draft model holds blocks of {owners}")
            if self.is_draining:
                left.append(f"{name} has not ended although it drains")
        return left
