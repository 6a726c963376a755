"""A prefill worker begins to compute wrongly. Its canary finds that, and no answer depends on the wrong blocks.

Real workers on fake engines, real sockets, and the gateway's own relay on top.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from kvrelay.engine.fake.engine import fake_card
from kvrelay.engine.fake.step import Share
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings
from kvrelay.prefill_worker.worker import PrefillWorker
from kvrelay.worker.worker import WRONG_EXIT_CODE
from tests.worker.broken import BreakableEngine

from .gate import Gate
from .workers import decode_worker, gateway, generate, worker_setup

PROMPT = random.Random(1).choices(range(1000), k=30)
NAME = "request"


class Breaks:
    """Passed as ``on_step``: breaks its engine before the first step with a request of the test."""

    def __init__(self) -> None:
        self.engine = BreakableEngine(fake_card(), self)

    def __call__(self, rows: Sequence[Share]) -> None:
        self.engine.is_broken |= any(row.sequence.name.startswith(NAME) for row in rows)


async def test_a_request_that_got_wrong_kv_is_answered_right() -> None:
    """The decode worker receives wrong blocks before the canary fails. It drops them, and the request is computed again."""
    registry, decode_registry, metrics = CollectorRegistry(), CollectorRegistry(), GatewayMetrics(CollectorRegistry())
    breaks, gate = Breaks(), Gate(num_tokens=0)
    prefill = PrefillWorker(
        breaks.engine, PrefillSchedulerSettings(), worker_setup("prefill", registry, canary_period_s=0.02)
    )
    decode = decode_worker(decode_registry, on_step=gate)
    async with gateway([prefill], [decode], metrics=metrics) as relay, asyncio.timeout(30):
        while not registry.get_sample_value("kvrelay_canaries_total", {"result": "same"}):
            await asyncio.sleep(0.005)  # polls for a state, bounded by the timeout above
        assert prefill.not_ready() == []
        running = asyncio.create_task(generate(relay, NAME, PROMPT, 12))
        (worker,) = relay.pool.prefills.values()
        while not (worker.is_wrong and decode.service._distrusted):
            await asyncio.sleep(0.005)
        assert breaks.engine.is_broken
        assert decode.blocks.ledger().num_cached == 0
        gate.open()
        assert (await running)[1] == 0
        await generate(relay, "again", PROMPT, 12)
        assert "it computes wrongly" in prefill.not_ready()[0]
        assert prefill.exit_code == WRONG_EXIT_CODE
        while not prefill.not_live():
            await asyncio.sleep(0.05)
    assert decode_registry.get_sample_value("kvrelay_received_kv_blocks_total") != 0
    labels = {"model": "tiny", "role": "prefill"}
    assert metrics.registry.get_sample_value("kvrelay_distrusted_workers_total", labels) == 1
