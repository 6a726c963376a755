"""Beam searches over real sockets: what the gateway hears, and how they end when something else ends them."""

from __future__ import annotations

import asyncio

import pytest

from kvrelay.common.sampling import BeamSearch, FinishReason, SamplingParams
from kvrelay.wire.messages import (
    Cancel,
    Cancelled,
    Failed,
    FailureCode,
    HandedOver,
    TokenDelta,
    Tokens,
)
from tests.decode_worker.rig import beams, expected_beams
from tests.engine.conftest import tokens
from tests.relay.gate import Gate
from tests.relay.harness import TIMEOUT_S, Link, relay

VOCAB = 1000


async def deltas_of(link: Link, name: str) -> list[TokenDelta]:
    """What a worker says of a request, until it has nothing more to say."""
    heard: list[TokenDelta] = []
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            message = await link.inbox.get()
            match message:
                case Tokens(items=items):
                    heard += [item for item in items if item.request_id == name]
                    if heard and heard[-1].finish_reason is not None:
                        return heard
                case HandedOver(request_id=request_id):
                    if request_id == name:
                        return heard
                case _:
                    raise AssertionError(f"unexpected {message}")


def found(delta: TokenDelta) -> list[list[int]]:
    assert delta.beams is not None
    assert delta.finish_reason is delta.beams[0].finish_reason
    return [[token.token_id for token in beam.tokens] for beam in delta.beams]


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("max_tokens", [1, 2, 12])
async def test_a_search_is_told_once_at_its_end_the_same_handed_over_and_local(width: int, max_tokens: int) -> None:
    prompt, sampling = tokens(width, 9), beams(width, max_tokens)
    async with relay() as running:
        running.submit("handed", prompt, sampling)
        (first,) = await deltas_of(running.to_prefill, "handed")
        assert (first.tokens, first.beams, first.finish_reason) == ([], None, None)
        assert first.timings is not None
        assert first.timings.prefill_s is not None
        *begun, last = await deltas_of(running.to_decode, "handed")
        assert found(last) == expected_beams(prompt, sampling, VOCAB)
        assert all(delta.tokens == [] and delta.beams is None for delta in begun)
        told = [delta.timings for delta in (*begun, last) if delta.timings is not None]
        assert [one.transfer_s is not None and one.first_step_s is not None for one in told] == [True]
        running.submit("local", prompt, sampling, local=True)
        *begun, last = await deltas_of(running.to_decode, "local")
        assert found(last) == expected_beams(prompt, sampling, VOCAB)
        told = [delta.timings for delta in (*begun, last) if delta.timings is not None]
        assert [one.prefill_s is not None for one in told] == [True]
        await running.settled()


async def test_the_best_few_are_returned_and_the_likeliest_first() -> None:
    sampling = SamplingParams(
        max_tokens=10, temperature=0.0, stop_token_ids=(7,), beam_search=BeamSearch(width=5, num_return=2)
    )
    async with relay() as running:
        running.submit("a", tokens(1, 9), sampling)
        (*_, last) = await deltas_of(running.to_decode, "a")
        assert last.beams is not None
        assert [beam.score for beam in last.beams] == sorted((beam.score for beam in last.beams), reverse=True)
        assert found(last) == expected_beams(tokens(1, 9), sampling, VOCAB)[:2]
        await running.settled()


async def test_a_search_that_is_cancelled_gives_everything_back() -> None:
    gate = Gate(num_tokens=4)
    async with relay(on_decode_step=gate) as running:
        running.submit("a", tokens(1, 9), beams(4, 50, stops=()))
        async with asyncio.timeout(TIMEOUT_S):
            begun = await running.to_decode.inbox.get()
            assert isinstance(begun, Tokens)
            assert running.to_decode.client.send(Cancel(request_id="a", attempt=1))
            assert running.to_decode.client.send(Cancel(request_id="unknown", attempt=1))
            # Messages are read in order: with the second answered, the first was read, and the search cannot end before it.
            assert await running.to_decode.inbox.get() == Cancelled(request_id="unknown", attempt=1)
            gate.open()
            assert await running.to_decode.inbox.get() == Cancelled(request_id="a", attempt=1)
        await running.settled()


async def test_a_step_that_fails_ends_a_search_once() -> None:
    calls = 0

    def fail(rows: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("out of memory")

    async with relay(on_decode_step=fail) as running:
        running.submit("a", tokens(1, 9), beams(4, stops=()), local=True)
        async with asyncio.timeout(TIMEOUT_S):
            while isinstance(message := await running.to_decode.inbox.get(), Tokens):
                pass
        assert isinstance(message, Failed)
        assert message.code is FailureCode.INTERNAL
        await running.settled()
        running.submit("b", tokens(1, 9), beams(4, stops=()), local=True)
        (*_, last) = await deltas_of(running.to_decode, "b")
        assert found(last) == expected_beams(tokens(1, 9), beams(4, stops=()), VOCAB)


async def test_searches_and_ordinary_requests_run_beside_each_other() -> None:
    async with relay() as running:
        wanted = {f"b{width}": (tokens(width, 5 + width), beams(width, 10)) for width in (2, 4, 3)}
        for index, (name, (prompt, sampling)) in enumerate(wanted.items()):
            running.submit(name, prompt, sampling, local=index == 1)
        running.submit("g", tokens(0, 9), 20)
        results: dict[str, list[list[int]]] = {}
        output: list[int] = []
        async with asyncio.timeout(TIMEOUT_S):
            while len(results) < 3 or len(output) < 20:
                message = await running.to_decode.inbox.get()
                assert isinstance(message, Tokens)
                for item in message.items:
                    if item.request_id == "g":
                        output += [token.token_id for token in item.tokens]
                        assert item.finish_reason in (None, FinishReason.LENGTH)
                    elif item.beams is not None:
                        results[item.request_id] = found(item)
        assert results == {name: expected_beams(*request, VOCAB) for name, request in wanted.items()}
        await running.settled()
