"""Requests in the relay, with workers that play a script: attempts, the order of tokens, deadlines, and one end."""

from __future__ import annotations

import asyncio

import pytest

from kvrelay.common.sampling import FinishReason, SampledToken
from kvrelay.gateway.errors import (
    AttemptsFailedError,
    InvalidRequestError,
    OverloadedError,
    RequestTimeoutError,
    UnavailableError,
)
from kvrelay.gateway.routing.breaker import BreakerState
from kvrelay.wire.messages import (
    Cancelled,
    FailureCode,
    HandedOver,
    Preempted,
    Submit,
    Timings,
    TokenDelta,
    Tokens,
)

from ..players import ALL, PROMPT, Player, asking, failing, good, in_turn, leave, stage, until


async def test_another_attempt_goes_on_where_the_last_one_ended(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with stage(failing(FailureCode.INTERNAL, after=2, times=1)) as s:
        assert await s.run() == ALL
        first, second = s.players[0].submits
        assert (first.token_ids, first.attempt) == (PROMPT, 1)
        assert (second.token_ids, second.attempt) == ([*PROMPT, 100, 101], 2)
        assert second.num_prompt_tokens == 3
        assert second.sampling == first.sampling
        told = "the request went on after 1 failed attempt; its client got all of it"
        assert [record.levelname for record in caplog.records if record.message == told] == ["INFO"]
        assert (s.attempts("internal"), s.attempts("finished")) == (1, 1)


def preempted(player: Player, submit: Submit) -> None:
    """A script that sends one token and is preempted. It only continues in a second attempt."""
    done = len(submit.token_ids) - submit.num_prompt_tokens
    player.tokens(submit, done, [100 + done])
    player.say(Preempted(request_id=submit.request_id, attempt=submit.attempt))
    if submit.attempt == 2:
        good(player, submit)


async def test_a_preempted_request_moves_once_and_that_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    async with stage(preempted, preempted, max_attempts=1) as s:
        assert await s.run() == ALL
        first, second = sorted(
            (submit for player in s.players for submit in player.submits), key=lambda one: one.attempt
        )
        assert [len(player.submits) for player in s.players] == [1, 1]
        assert (second.token_ids, second.sampling) == ([*first.token_ids, 100], first.sampling)
        assert (s.attempts("moved"), s.attempts("finished")) == (1, 1)
        assert s.relay.breakers.states() == {}
        left = next(player for player in s.players if player.submits == [first])
        assert await left.cancelled.get() == ("r", 1)
    assert not [record for record in caplog.records if "attempt" in record.message]


async def test_a_preempted_request_stays_where_it_is_if_nobody_else_has_room() -> None:
    def waits(player: Player, submit: Submit) -> None:
        player.say(Preempted(request_id=submit.request_id, attempt=submit.attempt))
        good(player, submit)

    async with stage(waits, waits) as s:
        roomy, full = s.players
        full.num_running, full.num_free_blocks = 1, 0
        while (status := s.pool.decodes[full.address].status) is None or not status.num_running:
            s.pool.changed.clear()
            await s.pool.changed.wait()
        assert await s.run() == ALL
        assert (len(roomy.submits), len(full.submits)) == (1, 0)


async def test_tokens_are_taken_by_position() -> None:
    """A worker repeats tokens, and sends some of another attempt. The relay drops both."""

    def script(player: Player, submit: Submit) -> None:
        player.tokens(submit, 0, [100])
        player.tokens(submit, 0, [100, 101])
        player.tokens(submit, 2, [666], attempt=submit.attempt - 1)
        player.tokens(submit, 1, [101, 102])
        player.tokens(submit, 3, [103], FinishReason.LENGTH)

    async with stage(script) as s:
        assert await s.run() == ALL


async def test_a_gap_is_a_failure_not_a_hole() -> None:
    def with_a_gap(player: Player, submit: Submit) -> None:
        player.tokens(submit, 0, [100])
        player.tokens(submit, 2, [102])

    async with stage(in_turn(with_a_gap, good)) as s:
        assert await s.run() == ALL
        assert len(s.players[0].submits) == 2


@pytest.mark.parametrize("max_attempts", [1, 4])
async def test_the_last_token_without_its_end_is_enough(max_attempts: int) -> None:
    async with stage(failing(FailureCode.INTERNAL, after=4), max_attempts=max_attempts) as s:
        assert await s.run() == ALL
        assert (len(s.players[0].submits), s.attempts("finished")) == (1, 1)


async def test_attempts_are_bounded_and_the_error_is_honest() -> None:
    async with stage(failing(FailureCode.INTEGRITY), max_attempts=3) as s:
        with pytest.raises(AttemptsFailedError, match=r"3 attempts failed.*integrity"):
            await s.run()
        assert len(s.players[0].submits) == 3
        assert [await s.players[0].cancelled.get() for _ in range(3)] == [("r", 1), ("r", 2), ("r", 3)]


@pytest.mark.parametrize(
    ("code", "error", "says"),
    [(FailureCode.INVALID, InvalidRequestError, "scripted"), (FailureCode.DEADLINE, RequestTimeoutError, "time")],
)
async def test_what_can_never_work_is_not_tried_again(code: FailureCode, error: type[Exception], says: str) -> None:
    """A worker out of time is no mistake of the client."""
    async with stage(failing(code)) as s:
        with pytest.raises(error, match=says):
            await s.run()
        assert len(s.players[0].submits) == 1


@pytest.mark.parametrize("code", [FailureCode.NO_ROOM, FailureCode.QUEUE_FULL])
async def test_waiting_for_room_is_no_failed_attempt(code: FailureCode) -> None:
    async with stage(failing(code, times=6, retry_after_s=0.01), max_attempts=2) as s:
        assert await s.run() == ALL
        assert s.attempts(code.value) == 6


@pytest.mark.parametrize(("retry_after_s", "room_timeout_s"), [(60.0, 0.3), (0.01, 2.0)])
async def test_waiting_for_room_is_bounded(retry_after_s: float, room_timeout_s: float) -> None:
    """Workers never have room. The request fails after ``room_timeout_s``, however soon each attempt is refused."""
    async with stage(failing(FailureCode.NO_ROOM, retry_after_s=retry_after_s), room_timeout_s=room_timeout_s) as s:
        with pytest.raises(UnavailableError, match="no worker has room") as caught:
            await s.run()
        assert caught.value.retry_after_s is not None
        assert (len(s.players[0].submits) > 1) is (retry_after_s < room_timeout_s)


async def test_a_prompt_counts_once_it_has_its_place() -> None:
    async with stage(failing(FailureCode.NO_ROOM, times=0), room_timeout_s=0.05) as s:
        with pytest.raises(UnavailableError):
            await s.deltas(asking(max_tokens=10**9))
        assert s.relay.metrics.tokens.counts == (0, 0, 0)
        await s.run()
        assert s.relay.metrics.tokens.counts[0] == len(PROMPT)


async def test_a_full_worker_is_passed_over_for_another() -> None:
    async with stage(failing(FailureCode.NO_ROOM, retry_after_s=60.0), failing(FailureCode.NO_ROOM, times=0)) as s:
        for _ in range(3):
            assert await s.run() == ALL


async def test_a_request_has_its_time() -> None:
    async with stage(lambda player, submit: player.tokens(submit, 0, [100]), request_timeout_s=0.2) as s:
        with pytest.raises(RequestTimeoutError, match=r"0\.2 s"):
            await s.run()
        assert await s.players[0].cancelled.get() == ("r", 1)


@pytest.mark.parametrize(("asked_s", "given_s"), [(0.2, 0.2), (1e6, 60.0)])
async def test_the_clients_own_time_counts_and_travels_with_the_request(asked_s: float, given_s: float) -> None:
    """A request's own time-out applies and is sent to the worker, but never exceeds that of the settings."""
    async with stage(lambda player, submit: player.tokens(submit, 0, [100]), request_timeout_s=60.0) as s:
        begun_s = s.relay.clock()
        running = asyncio.create_task(s.deltas(asking(timeout_s=asked_s)))
        while not s.players[0].submits:
            await asyncio.sleep(0)  # lets the request start
        timeout_s = s.players[0].submits[0].timeout_s
        assert timeout_s is not None
        assert given_s - (s.relay.clock() - begun_s) < timeout_s <= given_s
        if given_s == asked_s:
            with pytest.raises(RequestTimeoutError, match=r"0\.2 s"):
                await running
        else:
            running.cancel()
        assert await s.players[0].cancelled.get() == ("r", 1)


async def test_a_draining_worker_gets_nothing_new() -> None:
    async with stage(good, good) as s:
        await leave(s, s.players[0])
        for _ in range(4):
            assert await s.run() == ALL
        assert not s.players[0].submits


async def test_a_request_that_is_given_up_is_cancelled_on_both_workers() -> None:
    def begin(player: Player, submit: Submit) -> None:
        player.tokens(submit, 0, [100], timings=Timings(queue_s=0.1, prefill_s=0.2))

    async with stage(good, prefill=begin) as s:
        first: asyncio.Future[TokenDelta] = asyncio.get_running_loop().create_future()
        running = asyncio.create_task(s.deltas(asking(9), first.set_result))
        assert (await first).timings == Timings(queue_s=0.1, prefill_s=0.2)
        running.cancel()
        for player in s.players:
            assert await player.cancelled.get() == ("r", 1)


async def test_what_lost_workers_would_hold_is_no_reason() -> None:
    async with stage(good, prefill=good, room_timeout_s=0.1) as s:
        prefill, decode = s.players
        await prefill.server.stop()
        await until(s.pool, lambda: s.pool.is_local_only)
        decode.num_free_blocks, decode.num_running = 0, 1
        worker = s.pool.decodes[decode.address]
        await until(s.pool, lambda: worker.status is not None and not worker.status.num_free_blocks)
        with pytest.raises(OverloadedError, match=r"^no worker has room"):
            await s.run()


@pytest.mark.parametrize("handed_over", [True, False])
async def test_a_lost_prefill_worker_matters_until_the_hand_off(handed_over: bool) -> None:
    """A prefill worker is lost. After the hand-off the request goes on; before it, a decode worker gets a second attempt."""

    def prefill(player: Player, submit: Submit) -> None:
        player.tokens(submit, 0, [100])
        if handed_over:
            player.say(HandedOver(request_id=submit.request_id, attempt=submit.attempt))

    async with stage(good, prefill=prefill, room_timeout_s=0.1) as s:
        outcome = asyncio.create_task(s.run())
        lost = s.pool.prefills[s.players[0].address]
        while not (s.players[0].submits and lost.load and lost.load.attempts):
            await asyncio.sleep(0)  # lets the request start
        submit = s.players[0].submits[0]
        # A link keeps the order: when a new status has arrived, the hand-off is known.
        reported = lost.status
        await until(s.pool, lambda: lost.status is not reported)
        await s.players[0].server.stop()
        await until(s.pool, lambda: not lost.is_usable)
        if handed_over:
            s.players[1].gateway_id = "gateway"
            s.players[1].tokens(submit, 0, [100, 101, 102, 103], FinishReason.LENGTH)
        assert await outcome == ALL
        assert [one.decode for one in s.players[1].submits] == ([] if handed_over else [None])


@pytest.mark.parametrize("is_known_by", ["word", "tokens"])
async def test_a_late_failure_of_a_prefill_worker_does_not_end_a_healthy_stream(is_known_by: str) -> None:
    """The decode worker has the request already, and then the prefill worker reports a failure. The stream goes on."""

    def prefill(player: Player, submit: Submit) -> None:
        decode = s.players[1]
        decode.gateway_id = "gateway"
        player.tokens(submit, 0, [100], timings=Timings(prefill_s=0.1))
        if is_known_by == "word":
            player.say(HandedOver(request_id=submit.request_id, attempt=submit.attempt))
            player.fail(submit, FailureCode.PEER_LOST)
        else:
            decode.tokens(submit, 0, [100, 101], timings=Timings(transfer_s=0.1))
        running.append((player, submit))

    running: list[tuple[Player, Submit]] = []
    taken = asyncio.Semaphore(0)  # released for each delta, which has one token

    async with stage(good, prefill=prefill) as s:
        outcome = asyncio.create_task(s.deltas(asking(), lambda _: taken.release()))
        for _ in range(1 + (is_known_by == "tokens")):
            await taken.acquire()
        player, submit = running[0]
        if is_known_by == "tokens":
            player.fail(submit, FailureCode.PEER_LOST)
        # A link keeps the order: when a new status has arrived, the failure has arrived, too.
        worker, reported = s.pool.prefills[player.address], s.pool.prefills[player.address].status
        await until(s.pool, lambda: worker.status is not reported)
        s.players[1].tokens(submit, 1, [101, 102, 103], FinishReason.LENGTH)
        assert [token.token_id for delta in await outcome for token in delta.tokens] == [100, 101, 102, 103]
        assert len(player.submits) == 1


async def test_a_worker_that_fails_everybody_costs_three_requests_an_attempt(caplog: pytest.LogCaptureFixture) -> None:
    """A worker fails every request. After three it gets only probes, although it has the least load. No time for one passes."""
    async with stage(good, good, stands_still=True) as s:
        broken = s.players[0]
        broken.script = failing(FailureCode.INTERNAL)
        for number in range(12):
            assert await s.run(request_id=f"r{number}") == ALL
        assert len(broken.submits) == 3
        assert s.relay.breakers.states() == {(broken.address,): BreakerState.OPEN}
        assert s.num_open_breakers == 1
        name = s.pool.decodes[broken.address].name
    assert f"decode worker {name} at {broken.address} failed several requests" in caplog.text


async def test_a_worker_that_is_gone_has_no_open_breaker() -> None:
    """Three requests fail on a worker, and it leaves. No other request comes."""
    async with stage(failing(FailureCode.INTERNAL), max_attempts=1) as s:
        for number in range(3):
            with pytest.raises(AttemptsFailedError):
                await s.run(request_id=f"r{number}")
        assert s.num_open_breakers == 1
        s.pool.update([])
        assert s.num_open_breakers == 0
        assert s.relay.breakers.states() == {}


async def test_decode_workers_that_were_never_tried_compute_what_cannot_be_handed_over() -> None:
    """The only prefill worker fails all requests, and no worker's speed is known."""
    async with stage(good, prefill=failing(FailureCode.INTERNAL), local_prefill="sooner", room_timeout_s=0.3) as s:
        assert await s.run() == ALL
        assert [len(player.submits) for player in s.players] == [1, 1]
        assert s.players[1].submits[0].decode is None


async def test_a_prefill_worker_is_not_blamed_for_a_full_decode_worker() -> None:
    """A prefill worker reports that the decode worker has no room. The next attempt uses it again, with another decode worker."""
    async with stage(good, good, prefill=failing(FailureCode.NO_ROOM, times=1, retry_after_s=60.0)) as s:
        assert await s.run() == ALL
        first, second = s.players[0].submits
        assert first.decode is not None
        assert second.decode is not None
        assert first.decode.address != second.decode.address


async def test_a_request_that_a_worker_gave_up_goes_on() -> None:
    """A worker cancels a request that the gateway did not cancel, by either message. Another attempt finishes it."""

    def cancelled(player: Player, submit: Submit) -> None:
        player.say(Cancelled(request_id=submit.request_id, attempt=submit.attempt))

    async with stage(in_turn(cancelled, failing(FailureCode.CANCELLED, retry_after_s=0.0), good)) as s:
        assert await s.run() == ALL
        assert [submit.attempt for submit in s.players[0].submits] == [1, 2, 3]


async def test_what_an_earlier_attempt_computed_was_computed() -> None:
    """A second attempt finds the prompt cached by the first one. The client sees the first attempt's count."""
    counts = iter([1, 3])

    def script(player: Player, submit: Submit) -> None:
        done = len(submit.token_ids) - submit.num_prompt_tokens
        item = TokenDelta(
            request_id=submit.request_id,
            attempt=submit.attempt,
            index=done,
            tokens=[SampledToken(100 + done)],
            num_cached_tokens=next(counts),
        )
        player.say(Tokens(items=[item]))
        if done:
            player.tokens(submit, done + 1, [102, 103], FinishReason.LENGTH)
        else:
            player.fail(submit, FailureCode.INTERNAL)

    async with stage(script) as s:
        seen = [delta.num_cached_tokens for delta in await s.deltas(asking())]
        assert seen == [1, 1, None]
