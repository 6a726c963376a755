"""Prompt log probabilities come from the prefill worker and tokens from the decode worker, in any order."""

from __future__ import annotations

import asyncio

import pytest

from kvrelay.common.sampling import FinishReason, SampledToken
from kvrelay.wire.messages import FailureCode, Submit, Timings, TokenDelta, Tokens

from ..players import PROMPT, Player, Stage, asking, good, stage

KNOWN = [SampledToken(token_id, -0.5) for token_id in PROMPT[1:]]


def first_token(player: Player, submit: Submit) -> None:
    """Send the first token, as a prefill worker does."""
    item = TokenDelta(
        request_id=submit.request_id,
        attempt=submit.attempt,
        index=0,
        tokens=[SampledToken(100)],
        timings=Timings(queue_s=0.1, prefill_s=0.2),
        prompt_logprobs=None if submit.sampling.num_prompt_logprobs is None else KNOWN,
    )
    player.say(Tokens(items=[item]))


async def deltas_of(s: Stage) -> list[TokenDelta]:
    return await s.deltas(asking(3, num_prompt_logprobs=0))


def tokens_of(deltas: list[TokenDelta]) -> list[int]:
    return [token.token_id for delta in deltas for token in delta.tokens]


@pytest.mark.parametrize("overtakes", [False, True])
async def test_they_are_there_before_the_end(overtakes: bool) -> None:
    """The client gets the log probabilities before the end, even if the decode worker's end arrives first."""

    def prefill(player: Player, submit: Submit) -> None:
        decode = players[1]
        decode.gateway_id = "gateway"
        if not overtakes:
            first_token(player, submit)
        decode.tokens(submit, 0, [100, 101, 102], FinishReason.LENGTH, timings=Timings(transfer_s=0.1))
        if overtakes:
            asyncio.get_running_loop().call_later(0.1, first_token, player, submit)

    async with stage(good, prefill=prefill) as s:
        players = s.players
        deltas = await deltas_of(s)
        assert tokens_of(deltas) == [100, 101, 102]
        assert [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None] == [KNOWN]
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [FinishReason.LENGTH]
        assert deltas[-1].finish_reason is FinishReason.LENGTH


async def test_a_later_attempt_does_not_compute_them_again() -> None:
    def prefill(player: Player, submit: Submit) -> None:
        if submit.attempt == 1:
            first_token(player, submit)
            player.fail(submit, FailureCode.INTERNAL)
        else:
            good(player, submit)

    async with stage(good, prefill=[prefill, prefill]) as s:
        deltas = await deltas_of(s)
        assert tokens_of(deltas) == [100, 101, 102]
        assert [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None] == [KNOWN]
        submits = [submit for player in s.players for submit in player.submits]
        asked = {submit.attempt: submit.sampling.num_prompt_logprobs for submit in submits}
        assert asked == {1: 0, 2: None}


async def test_if_they_are_lost_another_attempt_tells_them() -> None:
    """All tokens have arrived, but the prefill worker fails before it has sent the log probabilities."""

    def prefill(player: Player, submit: Submit) -> None:
        decode = players[-1]
        decode.gateway_id = "gateway"
        decode.tokens(submit, 0, [100, 101, 102], FinishReason.LENGTH, timings=Timings(transfer_s=0.1))
        if submit.attempt == 1:
            player.fail(submit, FailureCode.INTERNAL)
        else:
            first_token(player, submit)

    async with stage(good, prefill=[prefill, prefill]) as s:
        players = s.players
        deltas = await deltas_of(s)
        assert tokens_of(deltas) == [100, 101, 102]
        assert deltas[0].prompt_logprobs == KNOWN
