"""Where the next attempt at a request goes: the workers' state, what they have cached, whom the request avoids.

The decision itself is a pure function (:mod:`kvrelay.gateway.routing.policy`); here is gathered what it decides by.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator

from kvrelay.common.clock import Clock
from kvrelay.gateway.relay.progress import GenerationRequest, Progress
from kvrelay.gateway.relay.settings import RelaySettings
from kvrelay.gateway.routing.breaker import CircuitBreakers, Part
from kvrelay.gateway.routing.forecast import Prefiller, Supply
from kvrelay.gateway.routing.policy import CachedPrefix, choose
from kvrelay.gateway.routing.prefixes import PrefixMap, RequestPrefix
from kvrelay.gateway.workers.pool import WorkerPool
from kvrelay.gateway.workers.view import WorkerView
from kvrelay.gateway.workers.worker import Worker

Pair = tuple[Worker | None, Worker]  # prefill worker, None for local prefill; decode worker


class Placement:
    """Finds pairs of workers for requests, over one pool."""

    def __init__(self, pool: WorkerPool, settings: RelaySettings, breakers: CircuitBreakers, clock: Clock) -> None:
        self._pool = pool
        self._breakers = breakers
        self._settings = settings
        self._clock = clock
        self._prefixes = PrefixMap(settings.prefix_map_blocks) if settings.policy == "prefix" else None
        self._sequence_number = 0

    def prefix_of(self, request: GenerationRequest) -> RequestPrefix:
        """What is known of who has the request's prompt cached, and will be."""
        return RequestPrefix(self._prefixes, request.prompt_token_ids, request.cache_salt)

    def no_room(self, max_len: int) -> str:
        """Why there is no place for a request of so many tokens."""
        reasons = self._pool.absent + [reason.split(" (")[0] for reason in self._pool.not_ready()]
        for role, workers in (("prefill", self._pool.prefills), ("decode", self._pool.decodes)):
            if not reasons and workers and not any(worker.holds(max_len) for worker in workers.values()):
                reasons.append(f"no {role} worker that is up holds the {max_len} tokens of prompt and output any more")
        if not reasons and self._breakers.shut(self._clock()):
            reasons.append("workers have failed all of several requests, and are tried again by one at a time")
        return "; ".join(reasons) or "no worker has room"

    def place(self, progress: Progress, num_tokens_to_hold: float) -> Pair | None:
        """A pair of workers that would compute the request before long; None while there is none.

        ``num_tokens_to_hold``: of prompt and output, as far as one can know.
        """
        backlog_s = self._settings.prefill_backlog_s
        return self.route(progress, backlog_s=backlog_s, num_tokens_to_hold=math.ceil(num_tokens_to_hold))

    def elsewhere(self, progress: Progress, decode: Worker) -> Pair | None:
        """A pair of workers with room for the request now, as long as it is by now, and another decode worker than ``decode``."""
        backlog_s, num_tokens = self._settings.prefill_backlog_s, progress.num_tokens + 1
        return self.route(progress, backlog_s=backlog_s, num_tokens_to_hold=num_tokens, without=decode.address)

    def supply(self) -> Supply:
        """What workers have for requests that wait."""
        now_s = self._clock()
        prefillers = [
            Prefiller(worker.load.num_waiting_tokens_at(now_s, view.tokens_per_s), view.tokens_per_s)
            for worker in self._pool.prefills.values()
            if worker.load is not None and (view := worker.view(0)) is not None
        ]
        return Supply.of(prefillers, views(self._pool.decodes.values(), 0), self._settings.prefill_backlog_s)

    def num_to_compute(self, progress: Progress) -> int:
        """Tokens of a request that a prefill worker will compute, as far as one knew when it was last routed."""
        is_local = self._is_local(progress.num_tokens) or progress.request.follows
        return 0 if is_local else progress.num_tokens - max(progress.prefix.cached.values(), default=0)

    def route(
        self, progress: Progress, *, backlog_s: float = math.inf, num_tokens_to_hold: int = 0, without: str = ""
    ) -> Pair | None:
        """A pair of workers; with a bound on what waits there, or blocks to be free, only such as keep it.

        ``without``: address of a decode worker that is not asked.
        """
        num_tokens = progress.num_tokens
        if (shared := self._shared_route(progress, num_tokens_to_hold)) is not None:
            return shared
        is_local = self._is_local(num_tokens)
        prefills = [] if is_local else views(self._pool.prefills.values(), progress.request.max_len)
        decodes = views(self._pool.decodes.values(), progress.request.max_len)
        if not math.isinf(backlog_s):
            prefills = [view for view in prefills if view.takes_prompt(backlog_s)]
            decodes = [view for view in decodes if view.takes_sequence(num_tokens_to_hold) and view.address != without]
        local_max = self._settings.local_prefill_max_tokens
        num_cached = progress.prefix.cached_tokens(progress.output, [*prefills, *decodes])
        if progress.sampling.num_prompt_logprobs is not None:
            num_cached = {}  # all of the prompt is computed for them
        cached = CachedPrefix(num_cached, local_max)
        if not is_local and not prefills:
            decodes = [view for view in decodes if cached.is_enough(view, num_tokens)]
        self._sequence_number += 1
        for some, others in self._choices(progress, prefills, decodes):
            route = choose(some, others, num_tokens + 1, self._sequence_number, cached)
            if route is not None:
                prefill = None if route.prefill is None else self._pool.prefills[route.prefill]
                return prefill, self._pool.decodes[route.decode]
        return None

    def _choices(
        self, progress: Progress, prefills: list[WorkerView], decodes: list[WorkerView]
    ) -> Iterator[tuple[list[WorkerView], list[WorkerView]]]:
        """Whom to choose among, the best choice first."""
        avoidance, now_s = progress.avoidance, self._clock()
        shut = self._shut(now_s)
        if not avoidance.is_any and not shut:
            yield prefills, decodes
            return
        for worker in self._pool.workers:
            avoidance.forgive(worker.address, worker.up_since_s)
        addresses = [[view.address for view in views] for views in (prefills, decodes)]
        for allowed_prefills, allowed_decodes in avoidance.choices(addresses[0], addresses[1], now_s, shut):
            some = [view for view in prefills if view.address in allowed_prefills]
            yield some, [view for view in decodes if view.address in allowed_decodes]

    def _is_local(self, num_tokens: int) -> bool:
        """Whether a decode worker computes all of a prompt."""
        return self._pool.is_local_only or num_tokens <= self._settings.local_prefill_max_tokens

    def _shut(self, now_s: float) -> Collection[Part]:
        """Who may not be asked by anybody now."""
        if not self._breakers.is_any:
            return ()
        self._breakers.keep({worker.address: worker.up_since_s for worker in self._pool.workers})
        return self._breakers.shut(now_s)

    def _shared_route(self, progress: Progress, num_tokens_to_hold: int) -> Pair | None:
        """The decode worker that has the prompt already, for another choice of it; None if it cannot take one more."""
        request = progress.request
        if not request.follows or request.share is None or progress.attempt:
            return None
        worker = self._pool.decodes.get(request.share.decode_address or "")
        is_shut = worker is not None and (worker.address,) in self._shut(self._clock())
        fitting = [] if worker is None or is_shut else views([worker], request.max_len)
        if worker is None or not fitting or not fitting[0].takes_sequence(num_tokens_to_hold):
            return None
        return None, worker

    def max_uncached_tokens(self, request: GenerationRequest, num_tokens: int) -> int | None:
        """What a decode worker without a prefill worker may compute of so many tokens; None: all of them."""
        local_max = self._settings.local_prefill_max_tokens
        is_for_cache = num_tokens > local_max and not self._pool.is_local_only and not request.follows
        return local_max if is_for_cache else None


def views(workers: Iterable[Worker], num_tokens: int) -> list[WorkerView]:
    """The usable workers that hold a request of ``num_tokens``."""
    return [view for worker in workers if (view := worker.view(num_tokens)) is not None]
