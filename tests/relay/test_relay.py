"""The whole relay on fake engines: tokens right, blocks back, whatever the load and whoever leaves."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import structs

from kvrelay.common.model_card import ModelCard
from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.engine.fake.engine import expected_output, fake_card
from kvrelay.engine.fake.step import Share
from kvrelay.engine.kv.owners import Owner, OwnerKind
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings
from kvrelay.wire.messages import Cancel, Cancelled, Failed, FailureCode

from .harness import relay

VOCAB = 1000


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 63])
async def test_handed_over_request(length: int) -> None:
    async with relay() as r:
        r.submit("a", prompt(1, length), 10)
        assert (await r.outcome("a"))["a"] == expected_output(prompt(1, length), 10, VOCAB)
        await r.settled()
        assert r.decode_registry.get_sample_value("kvrelay_handoffs_total", {"outcome": "verified"}) == 1


async def test_local_prefill_gives_the_same() -> None:
    async with relay() as r:
        r.submit("a", prompt(2, 30), 10, local=True)
        assert (await r.outcome("a"))["a"] == expected_output(prompt(2, 30), 10, VOCAB)
        await r.settled()


async def test_single_token_needs_no_hand_off() -> None:
    async with relay() as r:
        r.submit("a", prompt(2, 30), 1)
        assert (await r.outcome("a"))["a"] == expected_output(prompt(2, 30), 1, VOCAB)
        await r.settled()
        assert r.decode_registry.get_sample_value("kvrelay_handoffs_total", {"outcome": "verified"}) is None


@pytest.mark.parametrize("max_tokens", [2, 3])
async def test_the_shortest_hand_offs(max_tokens: int) -> None:
    """One token from the prefill worker and one or two from the decode worker, however fast the model thread is."""
    async with relay() as r:
        for index in range(20):
            r.submit(f"r{index}", prompt(index, 9), max_tokens)
            outcome = (await r.outcome(f"r{index}"))[f"r{index}"]
            assert outcome == expected_output(prompt(index, 9), max_tokens, VOCAB)
        await r.settled()


async def test_chunks_and_shared_prefixes() -> None:
    shared = prompt(3, 40)
    prompts = {f"r{i}": shared + prompt(i, 1 + 7 * i) for i in range(6)}
    settings = PrefillSchedulerSettings(max_batched_tokens=16)
    async with relay(
        prefill_settings=settings, prefill_card=fake_card(num_blocks=256), decode_card=fake_card(num_blocks=256)
    ) as r:
        for round_ in range(2):
            for name, tokens in prompts.items():
                r.submit(name, tokens, 8, attempt=round_)
            results = await r.outcome(*prompts)
            for name, tokens in prompts.items():
                assert results[name] == expected_output(tokens, 8, VOCAB), name
            await r.settled()
        reused = r.decode_registry.get_sample_value("kvrelay_kv_blocks_reused_total")
        assert reused is not None
        assert reused >= sum(len(tokens) // 4 for tokens in prompts.values())


async def test_many_with_preemption_on_a_small_pool() -> None:
    """The decode pool holds a fraction of what is asked for: grants are refused, sequences preempted, all of it right."""
    prompts = {f"r{i}": prompt(100 + i, 4 + 5 * i) for i in range(8)}
    async with relay(
        decode_card=fake_card(num_blocks=40),
        decode_settings=DecodeSchedulerSettings(max_num_seqs=8, max_batched_tokens=32),
    ) as r:
        for name, tokens in prompts.items():
            r.submit(name, tokens, 40, local=True)
        results = await r.outcome(*prompts)
        for name, tokens in prompts.items():
            assert results[name] == expected_output(tokens, 40, VOCAB), name
        await r.settled()
        assert r.decode_registry.get_sample_value("kvrelay_preemptions_total") > 0


async def test_no_room_is_told_with_a_time_to_come_back() -> None:
    async with relay() as r:
        others = Owner(OwnerKind.SEQUENCE, "others")
        r.decode.blocks.allocate(others, 60)
        r.submit("a", prompt(5, 100), 8)
        outcome = (await r.outcome("a"))["a"]
        assert isinstance(outcome, Failed)
        assert outcome.code is FailureCode.NO_ROOM
        assert outcome.retry_after_s is not None
        r.decode.blocks.release(others)
        await r.settled()


@pytest.mark.parametrize(
    ("decode", "num_tokens", "code", "says"),
    [
        ({}, 300, FailureCode.INVALID, "300 tokens leave no room to generate: the limit is 256"),
        # The prefill worker's limit is larger. Granted, the sequence would break a step, and all others with it.
        ({"max_model_len": 64}, 64, FailureCode.INVALID, "64 tokens leave no room to generate"),
        ({"model_id": "other"}, 10, FailureCode.LAYOUT_MISMATCH, "'other' / 'fake'"),
    ],
)
async def test_what_cannot_be_served_is_refused_with_the_reason(
    decode: dict[str, Any], num_tokens: int, code: FailureCode, says: str
) -> None:
    async with relay(decode_card=fake_card(**decode)) as r:
        failed = await r.failure(prompt(5, num_tokens))
        assert failed.code is code
        assert says in failed.detail


@pytest.mark.parametrize("mine", ["", "3fa85f6457174562"])
async def test_workers_with_other_kv_scales_do_not_exchange_blocks(mine: str) -> None:
    def card(kv_scales: str) -> ModelCard:
        made = fake_card()
        layout = structs.replace(made.layout, kv_scales=kv_scales)
        return structs.replace(made, layout=layout)

    theirs = "b3fc2c963f66afa6"
    async with relay(decode_card=card(mine), prefill_card=card(theirs)) as r:
        failed = await r.failure(prompt(5, 10))
        assert failed.code is FailureCode.LAYOUT_MISMATCH
        assert f"(decode / prefill): kv_scales: {mine!r} / {theirs!r} (other K/V scales" in failed.detail
        assert "same kv_scales.safetensors" in failed.detail
    async with relay(decode_card=card(theirs), prefill_card=card(theirs)) as r:
        r.submit("a", prompt(5, 10), 8)
        assert (await r.outcome("a"))["a"] == expected_output(prompt(5, 10), 8, VOCAB)
        await r.settled()


@pytest.mark.parametrize("local", [False, True])
async def test_cancel_while_it_generates(local: bool) -> None:
    async with relay() as r:
        r.submit("a", prompt(6, 20), 200, local=local)
        while True:  # the first tokens from the decode worker
            message = await asyncio.wait_for(r.to_decode.inbox.get(), 10)
            if not isinstance(message, Failed):
                break
        for link in (r.to_prefill, r.to_decode):
            link.client.send(Cancel(request_id="a", attempt=1))
        async with asyncio.timeout(10):
            while not isinstance(await r.to_decode.inbox.get(), Cancelled):
                pass
        await r.settled()


async def test_cancel_of_an_unknown_request_is_acknowledged() -> None:
    async with relay() as r:
        for link in (r.to_prefill, r.to_decode):
            link.client.send(Cancel(request_id="nobody", attempt=3))
            message = await asyncio.wait_for(link.inbox.get(), 10)
            assert message == Cancelled(request_id="nobody", attempt=3)


async def test_a_gateway_that_leaves_frees_its_blocks() -> None:
    async with relay() as r:
        for i in range(4):
            r.submit(f"r{i}", prompt(i, 30), 200)
        await asyncio.wait_for(r.to_prefill.inbox.get(), 10)
        await r.to_prefill.client.stop()
        await r.to_decode.client.stop()
        await r.settled()


async def test_a_failing_step_ends_its_requests_and_hurts_no_later_one() -> None:
    failures = iter([RuntimeError("boom")])

    def fail_once(rows: object) -> None:
        error = next(failures, None)
        if error is not None:
            raise error

    async with relay(on_decode_step=fail_once) as r:
        assert (await r.failure(prompt(7, 20))).code is FailureCode.INTERNAL
        r.submit("b", prompt(7, 20), 8)
        assert (await r.outcome("b"))["b"] == expected_output(prompt(7, 20), 8, VOCAB)
        await r.settled()


async def test_blocks_are_shipped_while_the_next_chunk_computes() -> None:
    """The prefill worker stands still in its third chunk; the blocks of the first two are with the decode worker by then."""
    is_open = threading.Event()

    def stop_in_third_chunk(rows: Sequence[Share]) -> None:
        if rows[0].row.start >= 32:
            assert is_open.wait(timeout=60)

    settings = PrefillSchedulerSettings(max_batched_tokens=16)
    async with relay(prefill_settings=settings, on_prefill_step=stop_in_third_chunk) as r:
        r.submit("a", prompt(9, 60), 8)
        async with asyncio.timeout(20):
            while not any(lease["received"] == 8 for lease in r.decode.leases.snapshot()):
                await asyncio.sleep(0.005)  # polls for a state, bounded by the timeout above
        assert [lease["state"] for lease in r.decode.leases.snapshot()] == ["shipping"]
        assert r.decode.blocks.ledger().num_leased == 16  # 60 tokens and the first one behind them
        is_open.set()
        assert (await r.outcome("a"))["a"] == expected_output(prompt(9, 60), 8, VOCAB)
        await r.settled()
