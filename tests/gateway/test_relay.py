"""The life of a request against workers that play a script: attempts, order, deadlines, one terminal outcome."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import pytest
import zmq
from prometheus_client import CollectorRegistry

from kvrelay.common.sampling import FinishReason, SampledToken, SamplingParams
from kvrelay.engine.fake import fake_card
from kvrelay.gateway.errors import (
    ApiError,
    AttemptsFailedError,
    InvalidRequestError,
    RequestTimeoutError,
    UnavailableError,
)
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.relay import GenerationRequest, Relay
from kvrelay.gateway.settings import RelaySettings
from kvrelay.gateway.workers import WorkerPool
from kvrelay.wire.control import ControlServer
from kvrelay.wire.messages import (
    Cancel,
    Cancelled,
    Failed,
    FailureCode,
    HandedOver,
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
from kvrelay.wire.settings import LinkSettings

LINKS = LinkSettings(ping_interval_s=0.05, peer_timeout_s=5.0)
PROMPT = [1, 2, 3]

Script = Callable[["Player", Submit], None]


class Player:
    """A worker that plays ``script`` on every Submit. Implements ServerHandler."""

    def __init__(self, role: Role, script: Script, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.role = role
        self.script = script
        self.submits: list[Submit] = []
        self.cancelled: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
        self.state = WorkerState.READY
        self.gateway_id = ""
        metrics = WireMetrics(CollectorRegistry())
        self.server = ControlServer("tcp://127.0.0.1:*", self, LINKS, metrics=metrics, context=context)
        self.address = ""

    def welcome(self, hello: Hello) -> Welcome | HelloRefused:
        return Welcome(role=self.role, worker_id="w", epoch=1, protocol=1, card=fake_card())

    def status(self) -> Status:
        return Status(
            state=self.state, num_running=0, num_waiting=0, num_waiting_tokens=0, num_free_blocks=64, num_blocks=64
        )

    def on_message(self, peer_id: str, role: Role, message: Message) -> None:
        self.gateway_id = peer_id
        match message:
            case Submit():
                self.submits.append(message)
                self.script(self, message)
            case Cancel(request_id=request_id, attempt=attempt):
                self.cancelled.put_nowait((request_id, attempt))
                self.say(Cancelled(request_id=request_id, attempt=attempt))

    def on_peer_lost(self, peer_id: str, role: Role) -> None:
        pass

    def say(self, message: Message) -> None:
        assert self.server.send(self.gateway_id, message)

    def tokens(
        self,
        submit: Submit,
        index: int,
        ids: list[int],
        finish: FinishReason | None = None,
        attempt: int | None = None,
        timings: Timings | None = None,
    ) -> None:
        item = TokenDelta(
            request_id=submit.request_id,
            attempt=submit.attempt if attempt is None else attempt,
            index=index,
            tokens=[SampledToken(token_id) for token_id in ids],
            finish_reason=finish,
            timings=timings,
        )
        self.say(Tokens(items=[item]))

    def fail(self, submit: Submit, code: FailureCode, retry_after_s: float | None = None) -> None:
        failed = Failed(
            request_id=submit.request_id,
            attempt=submit.attempt,
            code=code,
            detail="scripted",
            retry_after_s=retry_after_s,
        )
        self.say(failed)


class Stage:
    """A relay over players."""

    def __init__(self, relay: Relay, pool: WorkerPool, players: list[Player], metrics: GatewayMetrics) -> None:
        self.relay = relay
        self.pool = pool
        self.players = players
        self.metrics = metrics

    def attempts(self, outcome: str) -> float:
        value = self.metrics.registry.get_sample_value("kvrelay_attempts_total", {"outcome": outcome})
        return value or 0.0

    async def run(self, max_tokens: int = 4) -> tuple[list[int], FinishReason | None]:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=9)
        output: list[int] = []
        reason: FinishReason | None = None
        async with asyncio.timeout(20):
            async with aclosing(self.relay.generate(GenerationRequest("r", PROMPT, sampling))) as deltas:
                async for delta in deltas:
                    assert reason is None, "tokens behind the end"
                    output += [token.token_id for token in delta.tokens]
                    reason = delta.finish_reason
        return output, reason


@asynccontextmanager
async def stage(*scripts: Script, prefill: Script | None = None, **settings: float) -> AsyncIterator[Stage]:
    """One decode player per script, and a prefill player if there is one; all connected."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    prefills = [] if prefill is None else [Player(Role.PREFILL, prefill, context)]
    decodes = [Player(Role.DECODE, script, context) for script in scripts]
    players = [*prefills, *decodes]
    for player in players:
        player.address = await player.server.start()
    metrics = GatewayMetrics(CollectorRegistry())
    addresses = [[player.address for player in group] for group in (prefills, decodes)]
    pool = WorkerPool(addresses[0], addresses[1], "gateway", metrics, LINKS)
    pool.start()
    try:
        while not all(worker.is_usable for worker in pool.workers):
            pool.changed.clear()
            await pool.changed.wait()
        chosen = RelaySettings(local_prefill_max_tokens=0, **settings)  # type: ignore[arg-type]
        yield Stage(Relay(pool, chosen, metrics), pool, players, metrics)
    finally:
        await pool.stop()
        for player in players:
            await player.server.stop()
        await asyncio.to_thread(context.term)


def good(player: Player, submit: Submit) -> None:
    """Counts on from what is there: token i is 100 + i."""
    done = len(submit.token_ids) - submit.num_prompt_tokens
    rest = list(range(100 + done, 100 + submit.sampling.max_tokens))
    player.tokens(submit, done, rest[:1])
    player.tokens(submit, done + 1, rest[1:], FinishReason.LENGTH)


def failing(code: FailureCode, after: int = 0, times: int = 1000, retry_after_s: float | None = None) -> Script:
    """Sends ``after`` tokens, then fails; ``times`` times, then plays well."""
    left = iter(range(times))

    def script(player: Player, submit: Submit) -> None:
        if next(left, None) is None:
            good(player, submit)
            return
        done = len(submit.token_ids) - submit.num_prompt_tokens
        player.tokens(submit, done, list(range(100 + done, 100 + done + after)))
        player.fail(submit, code, retry_after_s)

    return script


ALL = ([100, 101, 102, 103], FinishReason.LENGTH)


async def test_another_attempt_goes_on_where_the_last_one_ended() -> None:
    async with stage(failing(FailureCode.INTERNAL, after=2, times=1)) as s:
        assert await s.run() == ALL
        first, second = s.players[0].submits
        assert (first.token_ids, first.attempt) == (PROMPT, 1)
        assert (second.token_ids, second.attempt) == ([*PROMPT, 100, 101], 2)
        assert second.num_prompt_tokens == 3
        assert second.sampling == first.sampling
        assert (s.attempts("internal"), s.attempts("finished")) == (1, 1)


async def test_tokens_are_taken_by_position() -> None:
    """Repeated ones are dropped, those of an attempt that is over too."""

    def script(player: Player, submit: Submit) -> None:
        player.tokens(submit, 0, [100])
        player.tokens(submit, 0, [100, 101])
        player.tokens(submit, 2, [666], attempt=submit.attempt - 1)
        player.tokens(submit, 1, [101, 102])
        player.tokens(submit, 3, [103], FinishReason.LENGTH)

    async with stage(script) as s:
        assert await s.run() == ALL


async def test_a_gap_is_a_failure_not_a_hole() -> None:
    calls = iter([True])

    def script(player: Player, submit: Submit) -> None:
        if next(calls, False):
            player.tokens(submit, 0, [100])
            player.tokens(submit, 2, [102])
        else:
            good(player, submit)

    async with stage(script) as s:
        assert await s.run() == ALL
        assert len(s.players[0].submits) == 2


async def test_the_last_token_without_its_end_is_enough() -> None:
    async with stage(failing(FailureCode.INTERNAL, after=4)) as s:
        assert await s.run() == ALL
        assert len(s.players[0].submits) == 1


async def test_attempts_are_bounded_and_the_error_is_honest() -> None:
    async with stage(failing(FailureCode.INTEGRITY), max_attempts=3) as s:
        with pytest.raises(AttemptsFailedError, match=r"3 attempts failed.*integrity"):
            await s.run()
        assert len(s.players[0].submits) == 3
        assert [await s.players[0].cancelled.get() for _ in range(3)] == [("r", 1), ("r", 2), ("r", 3)]


async def test_what_can_never_work_is_not_tried_again() -> None:
    async with stage(failing(FailureCode.INVALID)) as s:
        with pytest.raises(InvalidRequestError, match="scripted"):
            await s.run()
        assert len(s.players[0].submits) == 1


@pytest.mark.parametrize("code", [FailureCode.NO_ROOM, FailureCode.QUEUE_FULL])
async def test_waiting_for_room_is_no_failed_attempt(code: FailureCode) -> None:
    async with stage(failing(code, times=6, retry_after_s=0.01), max_attempts=2) as s:
        assert await s.run() == ALL
        assert s.attempts(code.value) == 6


async def test_waiting_for_room_is_bounded() -> None:
    async with stage(failing(FailureCode.NO_ROOM, retry_after_s=5.0), room_timeout_s=0.1) as s:
        with pytest.raises(UnavailableError, match="no worker has room") as caught:
            await s.run()
        assert caught.value.retry_after_s is not None


async def test_a_full_worker_is_passed_over_for_another() -> None:
    async with stage(failing(FailureCode.NO_ROOM, retry_after_s=60.0), failing(FailureCode.NO_ROOM, times=0)) as s:
        for _ in range(3):
            assert await s.run() == ALL


async def test_a_request_has_its_time() -> None:
    async with stage(lambda player, submit: player.tokens(submit, 0, [100]), request_timeout_s=0.2) as s:
        with pytest.raises(RequestTimeoutError, match=r"0\.2 s"):
            await s.run()
        assert await s.players[0].cancelled.get() == ("r", 1)


async def test_a_draining_worker_gets_nothing_new() -> None:
    async with stage(good, good) as s:
        s.players[0].state = WorkerState.DRAINING
        while s.pool.decodes[s.players[0].address].is_usable:
            s.pool.changed.clear()
            await s.pool.changed.wait()
        for _ in range(4):
            assert await s.run() == ALL
        assert not s.players[0].submits


async def test_closing_the_iterator_cancels_on_both_workers() -> None:
    def begin(player: Player, submit: Submit) -> None:
        player.tokens(submit, 0, [100], timings=Timings(queue_s=0.1, prefill_s=0.2))

    async with stage(good, prefill=begin) as s:
        sampling = SamplingParams(max_tokens=9, temperature=0.0)
        deltas = s.relay.generate(GenerationRequest("r", PROMPT, sampling))
        delta = await anext(deltas)
        assert delta.timings == Timings(queue_s=0.1, prefill_s=0.2)
        await deltas.aclose()
        for player in s.players:
            assert await player.cancelled.get() == ("r", 1)


@pytest.mark.parametrize("handed_over", [True, False])
async def test_a_lost_prefill_worker_matters_until_the_hand_off(handed_over: bool) -> None:
    """Behind it the decode worker owns the request; before it, another attempt must be made, and here nobody can."""

    def prefill(player: Player, submit: Submit) -> None:
        player.tokens(submit, 0, [100])
        if handed_over:
            player.say(HandedOver(request_id=submit.request_id, attempt=submit.attempt))

    async with stage(good, prefill=prefill, room_timeout_s=0.1) as s:
        outcome = asyncio.create_task(s.run())
        lost = s.pool.prefills[s.players[0].address]
        while not (s.players[0].submits and lost.attempts):
            await asyncio.sleep(0)  # lets the request start
        submit = s.players[0].submits[0]
        await s.players[0].server.stop()
        while lost.is_usable:
            s.pool.changed.clear()
            await s.pool.changed.wait()
        if handed_over:
            s.players[1].gateway_id = "gateway"
            s.players[1].tokens(submit, 0, [100, 101, 102, 103], FinishReason.LENGTH)
            assert await outcome == ALL
        else:
            with pytest.raises(ApiError, match="no prefill worker is up"):
                await outcome
