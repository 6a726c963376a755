"""The gateway's activity log: one line every ten seconds of work or refusals, and one about each worker that never answers."""

from __future__ import annotations

import asyncio
import logging

from kvrelay.common.clock import Clock
from kvrelay.gateway.model import Model, Models
from kvrelay.gateway.workers.worker import Worker
from kvrelay.wire.messages import Role

logger = logging.getLogger(__name__)

_EVERY_S = 10.0
_UNHEARD_S = 60.0  # a worker listens once its model is loaded


async def log_activity(models: Models, clock: Clock) -> None:
    """Log the activity of each model, and its workers that do not answer, until cancelled."""
    all_of_them = [Activity(model, clock) for model in models]
    unheard = [Unheard(model, clock) for model in models]
    while True:
        await asyncio.sleep(_EVERY_S)
        for one in all_of_them:
            if (line := one.line()) is not None:
                logger.info("%s%s", f"{one.model.name}: " if len(all_of_them) > 1 else "", line)
        for line in (line for one in unheard for line in one.lines()):
            logger.info("%s", line)


class Unheard:
    """One model's workers that have not answered since this gateway knows them: nobody else would say that an address is wrong."""

    def __init__(self, model: Model, clock: Clock) -> None:
        self._pool = model.pool
        self._clock = clock
        self._known_since_s: dict[Worker, float] = {}
        self._told: set[Worker] = set()

    def lines(self) -> list[str]:
        """A line about each worker that has been silent for a minute, once. Call it now and then."""
        now_s = self._clock()
        silent = {worker for worker in self._pool.workers if not worker.has_answered}
        self._known_since_s = {worker: self._known_since_s.get(worker, now_s) for worker in silent}
        late = [one for one, since_s in self._known_since_s.items() if now_s - since_s >= _UNHEARD_S]
        new = [one for one in late if one not in self._told]
        self._told = set(late)
        return [
            f"{one} has not answered for {now_s - self._known_since_s[one]:.0f} s: its model still "
            "loads, or no worker listens there"
            for one in new
        ]


class Activity:
    """One model's running, waiting and refused requests, tokens per second, KV in use and cache hits since the last line."""

    def __init__(self, model: Model, clock: Clock) -> None:
        self.model = model
        self._tokens = model.relay.metrics.tokens
        self._clock = clock
        self._before_s = clock()
        self._before = self._tokens.counts
        self._num_refused_before = model.relay.admission.num_refused

    def line(self) -> str | None:
        """A line about the time since the last call; None if there was no work and none waits."""
        now_s, now = self._clock(), self._tokens.counts
        passed_s = max(now_s - self._before_s, 1e-9)
        num_prompt, num_output, num_cached = (new - old for new, old in zip(now, self._before, strict=True))
        self._before_s, self._before = now_s, now
        admission, pool = self.model.relay.admission, self.model.pool
        num_running, num_waiting = admission.num_running, admission.num_queued
        num_refused = admission.num_refused - self._num_refused_before
        self._num_refused_before = admission.num_refused
        if not (num_running or num_waiting or num_prompt or num_output or num_refused):
            return None
        refused = f", {num_refused} refused for lack of room or time" if num_refused else ""
        parts = [
            f"{num_running} requests running, {num_waiting} waiting{refused}",
            f"{num_prompt / passed_s:.0f} prompt and {num_output / passed_s:.0f} output tokens/s",
        ]
        shares = [(role, pool.kv_in_use(role)) for role in (Role.PREFILL, Role.DECODE)]
        if kv := ", ".join(f"{role.value} {share:.0%}" for role, share in shares if share is not None):
            parts.append(f"KV in use: {kv}")
        if num_prompt:
            parts.append(f"{num_cached / num_prompt:.0%} of prompt tokens were cached")
        return "; ".join(parts)
