"""The assembled prefill worker: metrics of waiting prompts, and the largest step for a device."""

from __future__ import annotations

import threading

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.fake.engine import FakeEngine, fake_card
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings
from kvrelay.prefill_worker.worker import PrefillWorker
from kvrelay.wire.messages import DecodeTarget, Role, Submit
from kvrelay.wire.network import Network
from kvrelay.worker.setup import Setup


def prefill_worker(
    engine: FakeEngine, settings: PrefillSchedulerSettings, registry: CollectorRegistry
) -> PrefillWorker:
    return PrefillWorker(engine, settings, Setup("prefill", 1, "tcp://127.0.0.1:*", registry, Network.open()))


async def test_what_waits_is_told_in_tokens_and_seconds() -> None:
    registry, may_step = CollectorRegistry(), threading.Event()
    engine = FakeEngine(fake_card(), lambda rows: assert_is_set(may_step))
    settings = PrefillSchedulerSettings(max_num_seqs=1)  # the second prompt does not begin before the first has ended
    worker = prefill_worker(engine, settings, registry)

    def waiting() -> float | None:
        return registry.get_sample_value("kvrelay_waiting_prompt_tokens")

    def longest_wait_s() -> float:
        return registry.get_sample_value("kvrelay_longest_wait_seconds") or 0.0

    await worker.start()
    try:
        assert waiting() == 0
        for name in "ab":
            submit = Submit(
                request_id=name,
                attempt=1,
                token_ids=list(range(30)),
                num_prompt_tokens=30,
                sampling=SamplingParams(max_tokens=1),  # the first token is the last: no hand-off is needed
                decode=DecodeTarget(address="tcp://127.0.0.1:1"),
            )
            worker.service.on_message("gateway", Role.GATEWAY, submit)
        assert waiting() == 60
        first_s = longest_wait_s()
        assert longest_wait_s() > first_s > 0
        may_step.set()
        await worker.drain()
        assert (waiting(), longest_wait_s()) == (0, 0)
    finally:
        may_step.set()
        await worker.stop()


@pytest.mark.parametrize(("device_type", "num_steps"), [("cpu", 3), ("cuda", 1)])
async def test_the_largest_step_is_what_suits_the_device(device_type: str, num_steps: int) -> None:
    sizes: list[int] = []
    card = msgspec.structs.replace(fake_card(num_blocks=512), device_type=device_type)
    engine = FakeEngine(card, lambda rows: sizes.append(sum(row.num_tokens for row in rows)))
    settings = PrefillSchedulerSettings(ttft_budget_ms=0)
    worker = prefill_worker(engine, settings, CollectorRegistry())
    await worker.start()
    try:
        submit = Submit(
            request_id="a",
            attempt=1,
            token_ids=[1] * 1500,
            num_prompt_tokens=1500,
            sampling=SamplingParams(max_tokens=1),
            decode=DecodeTarget(address="tcp://127.0.0.1:1"),
        )
        worker.service.on_message("gateway", Role.GATEWAY, submit)
        await worker.drain()
    finally:
        await worker.stop()
    assert (len(sizes), sum(sizes)) == (num_steps, 1500)


def assert_is_set(event: threading.Event) -> None:
    assert event.wait(10)
