"""The whole relay on fake engines over real sockets: tokens are right and blocks are freed. Faults are in ``tests/simulation``."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry

from kvrelay.engine.fake.engine import fake_card
from kvrelay.engine.fake.step import Share
from kvrelay.gateway.relay.request import GenerationRequest, RequestTimings
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings
from kvrelay.wire.messages import TokenDelta
from tests.decode_worker.rig import beams, expected_beams

from .workers import decode_worker, gateway, generate, prefill_worker

VOCAB = fake_card().vocab_size


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


async def test_requests_of_all_lengths_are_handed_over_but_those_of_one_token() -> None:
    registry = CollectorRegistry()
    async with gateway([prefill_worker()], [decode_worker(registry)]) as relay:
        lengths = [(length, 10) for length in (1, 3, 4, 5, 8, 63)] + [(9, 2), (9, 3)] * 10
        for index, (length, max_tokens) in enumerate([*lengths, (30, 1)]):
            await generate(relay, f"r{index}", prompt(index, length), max_tokens)
    assert registry.get_sample_value("kvrelay_handoffs_total", {"outcome": "verified"}) == len(lengths)


@pytest.mark.parametrize("is_handed_over", [True, False])
async def test_a_search_is_told_once_at_its_end(is_handed_over: bool) -> None:
    async with gateway([prefill_worker()] if is_handed_over else [], [decode_worker()]) as relay:
        for width, max_tokens in ((1, 12), (2, 2), (4, 1), (8, 12)):
            tokens, sampling = prompt(width, 9), beams(width, max_tokens)
            heard: list[TokenDelta] = []

            def take(delta: TokenDelta, heard: list[TokenDelta] = heard) -> bool:
                heard.append(delta)
                return True

            await relay.run(GenerationRequest(f"b{width}", tokens, sampling, RequestTimings(0.0)), take)
            *begun, last = heard
            assert all(delta.tokens == [] and delta.beams is None for delta in begun)
            assert last.beams is not None
            found = [[token.token_id for token in beam.tokens] for beam in last.beams]
            assert found == expected_beams(tokens, sampling, VOCAB)


async def test_blocks_are_shipped_while_the_next_chunk_computes() -> None:
    """The prefill worker stops in its third chunk. The decode worker receives the blocks of the first two chunks meanwhile."""
    is_open = threading.Event()

    def stop_in_third_chunk(rows: Sequence[Share]) -> None:
        if rows[0].row.start >= 32:
            assert is_open.wait(timeout=60)

    prefill = prefill_worker(None, None, stop_in_third_chunk, settings=PrefillSchedulerSettings(max_batched_tokens=16))
    decode = decode_worker()
    async with gateway([prefill], [decode]) as relay:
        running = asyncio.create_task(generate(relay, "a", prompt(9, 60), 8))
        async with asyncio.timeout(20):
            while not any(lease["received"] == 8 for lease in decode.leases.snapshot()):
                await asyncio.sleep(0.005)  # polls for a state, bounded by the timeout above
        assert [lease["state"] for lease in decode.leases.snapshot()] == ["shipping"]
        assert decode.blocks.ledger().num_leased == 16  # blocks of 4 for 60 prompt tokens and the first output token
        is_open.set()
        await running
