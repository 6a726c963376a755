"""What a gateway tells its operator beside metrics: ``GET /debug/workers``, and a log line every ten seconds if there is work."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any

from kvrelay.common.clock import Clock
from kvrelay.gateway.metrics import TokenMeter
from kvrelay.gateway.model import Models
from kvrelay.gateway.routing.breaker import BreakerState
from kvrelay.wire.messages import Role

logger = logging.getLogger(__name__)

_EVERY_S = 10.0


def known_workers(models: Models) -> dict[str, Any]:
    """All workers with what they have to do, who gets probes only, how many requests wait, and which ways prompts went."""
    workers, pairs = [], []
    ways: Counter[tuple[str, str]] = Counter()
    for model in models:
        states = model.relay.breakers.states()
        for worker in model.pool.workers:
            view = worker.view(0)
            workers.append(
                {
                    "model": model.name,
                    "role": worker.role.value,
                    "address": worker.address,
                    "is_usable": worker.is_usable,
                    "problem": worker.misfit or ("" if worker.welcome is not None else worker.problem),
                    "breaker": states.get((worker.address,), BreakerState.CLOSED).value,
                    "num_requests": 0 if view is None else view.num_requests,
                    "num_waiting_tokens": 0 if view is None else view.num_waiting_tokens,
                    "prompt_tokens_per_s": None if view is None else view.tokens_per_s,
                    "num_free_blocks": 0 if view is None else view.num_free_blocks,
                }
            )
        ways += model.relay.prompt_ways
        pairs += [
            {"prefill": part[0], "decode": part[1], "breaker": state.value}
            for part, state in states.items()
            if len(part) == 2
        ]
    return {
        "workers": workers,
        "pairs": pairs,
        "num_queued": sum(model.relay.admission.num_queued for model in models),
        "prompt_ways": {f"{way}: {reason}": number for (way, reason), number in sorted(ways.items())},
    }


class Activity:
    """What runs and waits, tokens a second, KV in use, cache hits: since the line before."""

    def __init__(self, models: Models, tokens: TokenMeter, clock: Clock) -> None:
        self._models = models
        self._tokens = tokens
        self._clock = clock
        self._before_s = clock()
        self._before = tokens.counts

    async def run(self) -> None:
        """Log until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_S)
            if (line := self.line()) is not None:
                logger.info("%s", line)

    def line(self) -> str | None:
        """What was done since the last call; None if nothing was, and nothing is to do."""
        now_s, now = self._clock(), self._tokens.counts
        passed_s = max(now_s - self._before_s, 1e-9)
        num_prompt, num_output, num_cached = (new - old for new, old in zip(now, self._before, strict=True))
        self._before_s, self._before = now_s, now
        num_running = sum(model.relay.admission.num_running for model in self._models)
        num_waiting = sum(model.relay.admission.num_queued for model in self._models)
        if not (num_running or num_waiting or num_prompt or num_output):
            return None
        parts = [
            f"{num_running} requests running, {num_waiting} waiting",
            f"{num_prompt / passed_s:.0f} prompt and {num_output / passed_s:.0f} output tokens/s",
        ]
        shares = [(role, model.pool.kv_in_use(role)) for model in self._models for role in (Role.PREFILL, Role.DECODE)]
        if kv := ", ".join(f"{role.value} {share:.0%}" for role, share in shares if share is not None):
            parts.append(f"KV in use: {kv}")
        if num_prompt:
            parts.append(f"{num_cached / num_prompt:.0%} of prompt tokens were cached")
        return "; ".join(parts)
