"""Requests in the relay that wait in the line: who is refused at once, and who may join although it is full."""

from __future__ import annotations

import asyncio

import pytest

from kvrelay.common.sampling import FinishReason
from kvrelay.gateway.errors import UnavailableError
from kvrelay.gateway.relay.request import PromptShare
from kvrelay.wire.messages import Submit, Timings

from ..players import Player, asking, good, in_turn, queued, stage, until


async def test_who_would_wait_too_long_for_prompts_in_the_line_is_refused_at_once() -> None:
    """A prefill worker computes a token in ten seconds. Three tokens wait there, and another three wait in the line."""
    async with stage(good, prefill=good, room_timeout_s=50.0) as s:
        served = asking()  # from now on it is known how long answers take
        await s.deltas(served, lambda _: served.timings.on_tokens(s.relay.clock()))
        slow, worker = s.players[0], s.pool.prefills[s.players[0].address]
        slow.num_waiting_tokens, slow.prompt_tokens_per_s = 3, 0.1
        await until(s.pool, lambda: worker.tokens_per_s is not None)
        first = asyncio.create_task(s.run(request_id="first"))
        await queued(s, 1)
        with pytest.raises(UnavailableError, match=r"would come free in some 5\d s; the limit is 50 s"):
            await s.run(request_id="second")
        assert s.relay.admission.num_queued == 1
        first.cancel()


async def test_another_choice_of_an_answered_prompt_joins_a_full_line() -> None:
    def begins(player: Player, submit: Submit) -> None:
        player.tokens(submit, 0, [100], timings=Timings(prefill_s=0.1))

    async with stage(in_turn(begins, good), max_queued=1) as s:
        share = PromptShare()
        first, second = asking(), asking(request_id="second", choice=1)
        first.share = second.share = share
        running = asyncio.create_task(s.deltas(first))
        await share.settled()
        player, worker = s.players[0], s.pool.decodes[s.players[0].address]
        player.num_running = 10**6
        await until(s.pool, lambda: worker.status is not None and worker.status.num_running > 0)
        tasks = [asyncio.create_task(s.deltas(one)) for one in (asking(request_id="other"), second)]
        await queued(s, len(tasks))
        with pytest.raises(UnavailableError, match="1 requests wait already"):
            await s.run(request_id="too many")
        player.num_running = 0
        for task in tasks:
            assert (await task)[-1].finish_reason is FinishReason.LENGTH
        running.cancel()
