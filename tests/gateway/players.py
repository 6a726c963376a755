"""Workers that play a script on real control sockets, and a relay in front of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry

from kvrelay.common.model_card import ModelCard
from kvrelay.common.sampling import FinishReason, SampledToken, SamplingParams
from kvrelay.engine.fake.engine import fake_card
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.relay.relay import Relay
from kvrelay.gateway.relay.request import GenerationRequest, RequestTimings
from kvrelay.gateway.settings import RelaySettings
from kvrelay.gateway.text.tokenizer import Tokenizer
from kvrelay.gateway.workers.pool import WorkerPool, static_workers
from kvrelay.wire.control.server import ControlServer
from kvrelay.wire.messages import (
    AskImages,
    Cancel,
    Cancelled,
    Failed,
    FailureCode,
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

# Nobody here is lost by silence: a busy machine may let a test's process wait for many seconds.
LINKS = LinkSettings(ping_interval_s=0.05, peer_timeout_s=120.0)
PROMPT = [1, 2, 3]

Script = Callable[["Player", Submit], None]


class Player:
    """A worker that plays ``script`` on every Submit. Implements ServerHandler."""

    tokenizer: Tokenizer  # that of the application in front, if there is one

    def __init__(
        self,
        role: Role,
        script: Script,
        network: Network,
        card: ModelCard | None = None,
        links: LinkSettings = LINKS,
    ) -> None:
        self.role = role
        self.network = network
        self.card = card or fake_card()
        self.num_waiting_tokens = 0
        self.prompt_tokens_per_s: float | None = None
        self.num_running = 0
        self.num_free_blocks = 64
        self.script = script
        self.submits: list[Submit] = []
        self.asked: list[AskImages] = []
        self.tell: Callable[[Player, AskImages], None] = lambda *_: None  # its answers about images
        self.cancelled: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
        self.state = WorkerState.READY
        self.gateway_id = ""
        self.model = ""  # the model that its Welcome names
        metrics = WireMetrics(CollectorRegistry())
        self.server = ControlServer("tcp://127.0.0.1:*", self, links, metrics=metrics, network=network)
        self.address = ""

    def welcome(self, hello: Hello) -> Welcome | HelloRefused:
        return Welcome(role=self.role, worker_id="w", epoch=1, protocol=1, card=self.card, model=self.model)

    def status(self) -> Status:
        return Status(
            state=self.state,
            num_running=self.num_running,
            num_waiting=0,
            num_waiting_tokens=self.num_waiting_tokens,
            num_free_blocks=self.num_free_blocks,
            num_blocks=64,
            max_running=1000,
            prompt_tokens_per_s=self.prompt_tokens_per_s,
        )

    def on_message(self, peer_id: str, role: Role, message: Message) -> None:
        self.gateway_id = peer_id
        match message:
            case Submit():
                self.submits.append(message)
                self.script(self, message)
            case AskImages():
                self.asked.append(message)
                self.tell(self, message)
            case Cancel(request_id=request_id, attempt=attempt):
                self.cancelled.put_nowait((request_id, attempt))
                self.say(Cancelled(request_id=request_id, attempt=attempt))

    def on_peer_lost(self, peer_id: str, role: Role) -> None:
        pass

    def say(self, message: Message) -> None:
        assert self.server.send(Role.GATEWAY, self.gateway_id, message)

    def tokens(
        self,
        submit: Submit,
        index: int,
        ids: Sequence[int | SampledToken],
        finish: FinishReason | None = None,
        attempt: int | None = None,
        timings: Timings | None = None,
        prompt_logprobs: list[SampledToken] | None = None,
    ) -> None:
        item = TokenDelta(
            request_id=submit.request_id,
            attempt=submit.attempt if attempt is None else attempt,
            index=index,
            tokens=[SampledToken(token) if isinstance(token, int) else token for token in ids],
            finish_reason=finish,
            timings=timings,
            prompt_logprobs=prompt_logprobs,
        )
        self.say(Tokens(items=[item]))

    def fail(
        self,
        submit: Submit,
        code: FailureCode,
        retry_after_s: float | None = None,
        about: str | None = None,
        detail: str = "scripted",
    ) -> None:
        failed = Failed(
            request_id=submit.request_id,
            attempt=submit.attempt,
            code=code,
            detail=detail,
            retry_after_s=retry_after_s,
            about=about,
        )
        self.say(failed)


class Stage:
    """A relay in front of players."""

    def __init__(self, relay: Relay, pool: WorkerPool, players: list[Player], metrics: GatewayMetrics) -> None:
        self.relay = relay
        self.pool = pool
        self.players = players
        self.metrics = metrics

    def attempts(self, outcome: str) -> float:
        value = self.metrics.registry.get_sample_value("kvrelay_attempts_total", {"model": "tiny", "outcome": outcome})
        return value or 0.0

    @property
    def num_open_breakers(self) -> float | None:
        labels = {"model": "tiny", "of": "worker"}
        return self.metrics.registry.get_sample_value("kvrelay_circuit_breakers_open", labels)

    async def run(self, max_tokens: int = 4, request_id: str = "r") -> tuple[list[int], FinishReason | None]:
        deltas = await self.deltas(asking(max_tokens, request_id))
        assert all(delta.finish_reason is None for delta in deltas[:-1]), "tokens behind the end"
        return [token.token_id for delta in deltas for token in delta.tokens], deltas[-1].finish_reason

    async def deltas(
        self, request: GenerationRequest, on_delta: Callable[[TokenDelta], object] = lambda _: None
    ) -> list[TokenDelta]:
        """Run a request and return all its deltas. ``on_delta`` is called with each as it arrives."""
        taken: list[TokenDelta] = []

        def take(delta: TokenDelta) -> bool:
            taken.append(delta)
            on_delta(delta)
            return True

        async with asyncio.timeout(20):
            await self.relay.run(request, take)
        return taken


def asking(max_tokens: int = 4, request_id: str = "r", **more: Any) -> GenerationRequest:
    """A request with prompt ``PROMPT``. ``more`` are further sampling parameters, or ``timeout_s``."""
    timeout_s = more.pop("timeout_s", math.inf)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=9, **more)
    return GenerationRequest(request_id, PROMPT, sampling, RequestTimings(0.0), timeout_s=timeout_s)


async def until(pool: WorkerPool, holds: Callable[[], bool]) -> None:
    """Wait until a condition on the pool's workers holds."""
    async with asyncio.timeout(20):
        while not holds():
            pool.changed.clear()
            await pool.changed.wait()


async def leave(on: Stage, player: Player) -> None:
    """A player begins to drain, and the gateway has heard of it."""
    [worker] = [one for one in on.pool.workers if one.address == player.address]
    player.state = WorkerState.DRAINING
    await until(on.pool, lambda: not worker.is_usable)


async def queued(on: Stage, number: int) -> None:
    """Wait until so many requests wait, in the line and beside it."""
    async with asyncio.timeout(20):
        while on.relay.admission.num_queued != number:
            await asyncio.sleep(0.001)  # polls for a state


@asynccontextmanager
async def stage(
    *scripts: Script,
    prefill: Script | Sequence[Script] = (),
    needs_prefill_workers: bool = False,
    local_prefill: str = "fallback",
    stands_still: bool = False,
    prefill_cards: Sequence[ModelCard] = (),
    decode_cards: Sequence[ModelCard] = (),
    **settings: float,
) -> AsyncIterator[Stage]:
    """A relay connected to a decode player for each script, and to a prefill player for each script of ``prefill``.

    ``prefill_cards``, ``decode_cards``: of the players, if not the usual one. ``stands_still``: the relay's clock shows the time at
    which the players were there.
    """
    network = Network.open()
    prefill_scripts = [prefill] if callable(prefill) else prefill
    cards = prefill_cards or [fake_card()] * len(prefill_scripts)
    prefills = [
        Player(Role.PREFILL, script, network, card) for script, card in zip(prefill_scripts, cards, strict=True)
    ]
    cards = decode_cards or [fake_card()] * len(scripts)
    decodes = [Player(Role.DECODE, script, network, card) for script, card in zip(scripts, cards, strict=True)]
    players = [*prefills, *decodes]
    for player in players:
        player.address = await player.server.start()
    metrics = GatewayMetrics(CollectorRegistry())
    addresses = [[player.address for player in group] for group in (prefills, decodes)]
    of_model = metrics.of_model("tiny")
    pool = WorkerPool("gateway", of_model, LINKS, Network.open(), needs_prefill_workers=needs_prefill_workers)
    pool.update(static_workers(*addresses))
    try:
        await until(pool, lambda: all(worker.is_usable for worker in pool.workers))
        chosen = RelaySettings(local_prefill=local_prefill, **settings)  # type: ignore[arg-type]
        now_s = network.clock()
        clock = (lambda: now_s) if stands_still else network.clock
        yield Stage(Relay(pool, chosen, of_model, clock), pool, players, metrics)
    finally:
        await pool.stop()
        for player in players:
            await player.server.stop()
        await asyncio.to_thread(network.close)


def good(player: Player, submit: Submit) -> None:
    """Sends the rest of the output: token i is 100 + i."""
    done = len(submit.token_ids) - submit.num_prompt_tokens
    rest = list(range(100 + done, 100 + submit.sampling.max_tokens))
    player.tokens(submit, done, rest[:1])
    player.tokens(submit, done + 1, rest[1:], FinishReason.LENGTH)


def failing(code: FailureCode, after: int = 0, times: int = 1000, retry_after_s: float | None = None) -> Script:
    """A script that sends ``after`` tokens and fails, ``times`` times. Then it plays ``good``."""
    left = iter(range(times))

    def script(player: Player, submit: Submit) -> None:
        if next(left, None) is None:
            good(player, submit)
            return
        done = len(submit.token_ids) - submit.num_prompt_tokens
        player.tokens(submit, done, list(range(100 + done, 100 + done + after)))
        player.fail(submit, code, retry_after_s)

    return script


def in_turn(*scripts: Script) -> Script:
    """A script that plays one script for each request in turn, and the last one for all others."""
    return lambda player, submit: scripts[min(len(player.submits), len(scripts)) - 1](player, submit)


ALL = ([100, 101, 102, 103], FinishReason.LENGTH)
