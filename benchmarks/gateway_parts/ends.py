"""The two ends of ``gateway.py``'s measurement: a played decode worker, and a client that asks it without a gateway."""

from __future__ import annotations

import asyncio
import time

from prometheus_client import CollectorRegistry

from gateway_parts.direct_link import DirectLink
from kvrelay.common.sampling import FinishReason, SampledToken, SamplingParams
from kvrelay.engine.fake.engine import fake_card
from kvrelay.wire.control.server import ControlServer
from kvrelay.wire.messages import (
    Hello,
    HelloRefused,
    Message,
    Role,
    Status,
    Submit,
    Timings,
    TokenDelta,
    Tokens,
    Welcome,
    WorkerState,
)
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.network import Network
from kvrelay.wire.settings import LinkSettings

FIRST_MARK = 1000  # the first token of a prompt identifies its request
VOCAB_SIZE = 49_152


class PacedWorker:
    """A decode worker on a real control socket, with a token per running request every ``step_s``. Implements ServerHandler."""

    def __init__(self, step_s: float, network: Network) -> None:
        self.received_s: dict[int, float] = {}  # by the request's mark
        self.sent_s: dict[int, list[float]] = {}
        self._step_s = step_s
        self._running: dict[int, Submit] = {}
        self._waiting: list[list[float]] = []  # lists that get the time of the next message
        self._gateway = ""
        metrics = WireMetrics(CollectorRegistry())
        self.server = ControlServer("tcp://127.0.0.1:*", self, LinkSettings(), metrics=metrics, network=network)

    def welcome(self, hello: Hello) -> Welcome | HelloRefused:
        """Accept every peer."""
        card = fake_card(num_blocks=4096, block_size=16, vocab_size=VOCAB_SIZE)
        return Welcome(role=Role.DECODE, worker_id="paced", epoch=1, protocol=1, card=card)

    def status(self) -> Status:
        """Report free room."""
        return Status(
            state=WorkerState.READY,
            num_running=len(self._running),
            num_waiting=0,
            num_waiting_tokens=0,
            num_free_blocks=4096,
            num_blocks=4096,
            max_running=1000,
        )

    def on_message(self, peer_id: str, role: Role, message: Message) -> None:
        """Take a request."""
        self._gateway = peer_id
        if isinstance(message, Submit):
            mark = message.token_ids[0]
            self.received_s[mark] = time.monotonic()
            self._running[mark] = message
            self.sent_s[mark] = []

    def on_peer_lost(self, peer_id: str, role: Role) -> None:
        """Do nothing: the run ends."""

    async def run(self) -> None:
        """Run steps until cancelled."""
        while True:
            started_s = time.monotonic()
            items = [self._next_token(mark, submit) for mark, submit in list(self._running.items())]
            if items:
                now_s = time.monotonic()
                for sent in self._waiting:
                    sent.append(now_s)
                self._waiting.clear()
                self.server.send(Role.GATEWAY, self._gateway, Tokens(items=items))
            await asyncio.sleep(max(0.0, started_s + self._step_s - time.monotonic()))

    def _next_token(self, mark: int, submit: Submit) -> TokenDelta:
        sent = self.sent_s[mark]
        index = len(sent)
        is_last = index + 1 == submit.sampling.max_tokens
        if is_last:
            del self._running[mark]
        self._waiting.append(sent)
        return TokenDelta(
            request_id=submit.request_id,
            attempt=submit.attempt,
            index=index,
            tokens=[SampledToken(2000 + (37 * index + mark) % 15_000)],
            finish_reason=FinishReason.LENGTH if is_last else None,
            num_cached_tokens=None if index else 0,
            timings=None if index else Timings(queue_s=0.0, prefill_s=self._step_s),
        )


async def ask_directly(link: DirectLink, mark: int, tokens: int) -> tuple[float, list[float]]:
    """The time when a request was sent, and the times when its tokens came."""
    name, prompt, came_s = str(mark), prompt_of(mark), list[float]()
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0)
    submit = Submit(request_id=name, attempt=1, token_ids=prompt, num_prompt_tokens=len(prompt), sampling=sampling)
    sent_s = time.monotonic()
    link.client.send(submit)
    while len(came_s) < tokens:
        came_s.append((await link.next(name))[0])
    return sent_s, came_s


def prompt_of(mark: int) -> list[int]:
    """The prompt of the request ``mark``."""
    return [mark, *range(2000, 2127)]
