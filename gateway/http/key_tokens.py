"""Gateways tell each other what API keys have used. A report goes through one worker, another one each time, so a worker that hangs
delays only its own turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvrelay.gateway.http.api_keys import ApiKeys
from kvrelay.gateway.routing.budgets import TELL_S
from kvrelay.gateway.workers.pool import WorkerPool
from kvrelay.wire.messages import KeyTokens


async def exchange(keys: ApiKeys, pools: Sequence[WorkerPool]) -> None:
    """Send and receive reports until cancelled."""
    for pool in pools:
        pool.on_key_tokens = keys.hear
    turn = 0

    def send(told: KeyTokens) -> bool:
        workers = [worker for pool in pools for worker in pool.workers if worker.client.is_up]
        return bool(workers) and workers[turn % len(workers)].client.send(told)

    while True:
        keys.tell(send)
        turn += 1
        await asyncio.sleep(TELL_S)
