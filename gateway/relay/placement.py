"""Finds the workers for a request's next attempt, from the workers' state, their caches, and what the request avoids.

The decision itself is pure (:mod:`kvrelay.gateway.routing.ways`). This module gathers its inputs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping

from kvrelay.common.clock import Clock
from kvrelay.gateway.relay.request import GenerationRequest, Place
from kvrelay.gateway.routing.breaker import CircuitBreakers, Part
from kvrelay.gateway.routing.forecast import Prefiller, Supply
from kvrelay.gateway.routing.prefixes import PrefixMap, RequestPrefix
from kvrelay.gateway.routing.ways import (
    CLEARLY_SOONER,
    Limits,
    Reason,
    Route,
    best_local,
    choose,
    choose_way,
    with_adapter,
)
from kvrelay.gateway.settings import RelaySettings
from kvrelay.gateway.workers.load import Key, WorkerView
from kvrelay.gateway.workers.pool import WorkerPool
from kvrelay.gateway.workers.worker import Worker
from kvrelay.wire.messages import Role

# The part of a worker's allowed backlog for keys that have had more than others: about two steps of a prefill worker.
_AHEAD_PART = 1 / 4


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
        """Which workers have the request's prompt cached, as far as this gateway knows."""
        spans = [image.span for image in request.images]
        return RequestPrefix(self._prefixes, request.prompt_token_ids, request.spec.cache_salt, request.adapter, spans)

    def no_room(self, request: GenerationRequest) -> str:
        """Why there is no place for the request."""
        max_len = request.max_len
        reasons = self._pool.absent + self._pool.public_reasons
        for role, workers in (("prefill", self._pool.prefills), ("decode", self._pool.decodes)):
            up = [worker for worker in workers.values() if worker.welcome is not None]
            if not reasons and up and not any(worker.holds(max_len) for worker in up):
                reasons.append(f"no {role} worker that is up holds the {max_len} tokens of prompt and output any more")
        if not reasons and request.images and not self._pool.image_readers:
            reasons.append("no worker that reads images is up")
        if not reasons and self._breakers.shut(self._clock()):
            reasons.append("workers have failed all of several requests, and are tried again by one at a time")
        text = "; ".join(reasons) or "no worker has room"
        return f"model {self._pool.model!r}: {text}" if self._pool.model else text

    def place(self, request: GenerationRequest, num_tokens_to_hold: float, *, is_ahead: bool) -> Place | None:
        """Workers that would compute the request soon, over either way; None if there are none.

        ``num_tokens_to_hold``: estimated tokens of prompt and output. ``is_ahead``: the request's key is ahead of others, so the
        request gets only a worker with little backlog. Others' requests, which come first, then still find workers.
        """
        backlog_s = self._settings.prefill_backlog_s * (_AHEAD_PART if is_ahead else 1.0)
        return self.route(request, backlog_s=backlog_s, num_tokens_to_hold=math.ceil(num_tokens_to_hold))

    def elsewhere(self, request: GenerationRequest, decode: Worker) -> Place | None:
        """A place for the request, at its current length, on another decode worker than ``decode``."""
        backlog_s, num_tokens = self._settings.prefill_backlog_s, request.num_tokens + 1
        return self.route(request, backlog_s=backlog_s, num_tokens_to_hold=num_tokens, without=decode.address)

    def sooner(self, request: GenerationRequest, prefill: Worker, key: Key) -> Place | None:
        """A decode worker that would compute a prompt clearly sooner than ``prefill``, where attempt ``key`` waits."""
        view = prefill.view(0)
        local_backlog_s = self._local_backlog_of(request)
        if local_backlog_s is None or prefill.load is None or view is None or not view.tokens_per_s:
            return None
        num_tokens = request.num_tokens
        decodes = views(self._pool.decodes.values(), request.max_len)
        decodes = [one for one in decodes if one.takes_sequence(num_tokens + 1)]
        cached = _cached(request, decodes)
        self._sequence_number += 1
        hand_off_s = prefill.load.num_tokens_until(key, self._clock(), view.tokens_per_s) / view.tokens_per_s
        for _, others in self._choices(request, [], decodes):
            local = best_local([view], others, num_tokens, self._sequence_number, cached, local_backlog_s)
            if local is not None and local[0] < hand_off_s * CLEARLY_SOONER:
                return self._place_of(Route(None, local[1]), Reason.TAKEN_BACK, num_tokens, cached)
        return None

    def supply(self) -> Supply:
        """What the workers have free for waiting requests."""
        decodes = views(self._pool.decodes.values(), 0)
        now_s, computing = self._clock(), list(self._pool.prefills.values())
        if self._local_backlog_s is not None and not self._pool.is_local_only:
            computing += self._pool.decodes.values()
        prefillers = [
            Prefiller(worker.load.num_waiting_tokens_at(now_s, view.tokens_per_s), view.tokens_per_s)
            for worker in computing
            if worker.load is not None and (view := worker.view(0)) is not None and view.tokens_per_s
        ]
        return Supply.of(prefillers, decodes, self._settings.prefill_backlog_s)

    def look(self, request: GenerationRequest) -> int:
        """Tokens of the request's prompt that a worker must compute, as estimated now. Costs a look-up of its blocks."""
        if not self._pool.is_local_only and not request.follows:
            request.prefix.cached_tokens(request.output, views(self._pool.workers, request.max_len))
        return self.num_to_compute(request)

    def num_to_compute(self, request: GenerationRequest) -> int:
        """The same, as estimated at the last look or search for a place."""
        if self._pool.is_local_only or request.follows:
            return 0
        return request.num_tokens - max(request.prefix.cached.values(), default=0)

    def route(
        self, request: GenerationRequest, *, backlog_s: float = math.inf, num_tokens_to_hold: int = 0, without: str = ""
    ) -> Place | None:
        """Workers for the next attempt. ``backlog_s`` bounds what waits at them; ``num_tokens_to_hold`` must fit their free blocks.

        ``without``: address of a decode worker to leave out.
        """
        if (shared := self._shared_place(request, num_tokens_to_hold)) is not None:
            return shared
        is_local_only, prefill_workers, decode_workers = self._workers_for(request)
        prefills = [] if is_local_only else views(prefill_workers, request.max_len)
        decodes = views(decode_workers, request.max_len)
        if not math.isinf(backlog_s):
            decodes = [view for view in decodes if view.takes_sequence(num_tokens_to_hold) and view.address != without]
        cached = _cached(request, [*prefills, *decodes])
        local_backlog_s = self._local_backlog_of(request)
        limits = Limits(backlog_s, None if local_backlog_s is None else min(backlog_s, local_backlog_s))
        self._sequence_number += 1
        for prefills_left, decodes_left in self._choices(request, prefills, decodes):
            some, others = self._with_adapter(request, prefills_left, decodes_left)
            if is_local_only:
                route = choose([], others, request.num_tokens + 1, self._sequence_number, cached)
                way = None if route is None else (route, Reason.ONLY_WAY)
            else:
                way = choose_way(some, others, request.num_tokens, self._sequence_number, cached, limits)
            if way is not None:
                return self._place_of(*way, request.num_tokens, cached)
        return None

    def _with_adapter(
        self, request: GenerationRequest, prefills: list[WorkerView], decodes: list[WorkerView]
    ) -> tuple[list[WorkerView], list[WorkerView]]:
        """Those of either role that have the request's adapter, if one of them has a place."""
        if request.adapter is None:
            return prefills, decodes
        digest, backlog_s = request.adapter.digest, self._settings.prefill_backlog_s
        return (
            with_adapter(prefills, digest, lambda view: view.takes_prompt(backlog_s)),
            with_adapter(decodes, digest, lambda view: not view.is_full and view.has_room(request.num_tokens + 1)),
        )

    def _place_of(self, route: Route, reason: Reason, num_tokens: int, cached: Mapping[str, int]) -> Place:
        decode = self._pool.decodes[route.decode]
        if route.prefill is not None:
            prefill = self._pool.prefills[route.prefill]
            return Place(prefill, decode, reason, num_tokens - cached.get(prefill.address, 0))
        # If the worker was chosen for its cache and has evicted the blocks, the ways must be compared again.
        num_to_compute = num_tokens - cached.get(decode.address, 0)
        may_be_wrong = num_to_compute < num_tokens and not self._pool.is_local_only
        return Place(None, decode, reason, num_to_compute, num_to_compute if may_be_wrong else None)

    def _workers_for(self, request: GenerationRequest) -> tuple[bool, Iterable[Worker], Iterable[Worker]]:
        """Whether decode workers must compute the request's prompt, and the prefill and decode workers that it may have.

        Images are computed by workers that read them: by decode workers only if no prefill worker does.
        """
        pool = self._pool
        if not request.images:
            return pool.is_local_only, pool.prefills.values(), pool.decodes.values()
        readers = pool.image_readers
        if readers and readers[0].role is Role.DECODE:
            return True, (), readers
        return False, readers, pool.decodes.values()

    def _local_backlog_of(self, request: GenerationRequest) -> float | None:
        """What may wait at a decode worker that is to compute the prompt, in seconds; None: none may. See ``_workers_for``."""
        return None if request.images else self._local_backlog_s

    @property
    def _local_backlog_s(self) -> float | None:
        return self._settings.prefill_backlog_s if self._settings.local_prefill == "sooner" else None

    def _choices(
        self, request: GenerationRequest, prefills: list[WorkerView], decodes: list[WorkerView]
    ) -> Iterator[tuple[list[WorkerView], list[WorkerView]]]:
        """Groups of workers to choose among, the best first."""
        avoidance, now_s = request.avoidance, self._clock()
        shut = self._shut(now_s)
        if not avoidance.is_any and not shut:
            yield prefills, decodes
            return
        for worker in self._pool.workers:
            avoidance.forgive(worker.address, worker.up_since_s)
        addresses = [[view.address for view in views] for views in (prefills, decodes)]
        choices = list(avoidance.choices(addresses[0], addresses[1], now_s, shut))
        if not choices:  # no pair may hand it over
            choices = list(avoidance.choices((), addresses[1], now_s, shut))
        for allowed_prefills, allowed_decodes in choices:
            some = [view for view in prefills if view.address in allowed_prefills]
            yield some, [view for view in decodes if view.address in allowed_decodes]

    def _shut(self, now_s: float) -> Collection[Part]:
        """Workers and pairs that no request may use now."""
        return self._breakers.shut(now_s) if self._breakers.is_any else ()

    def _shared_place(self, request: GenerationRequest, num_tokens_to_hold: int) -> Place | None:
        """The decode worker that already has the prompt for another of its choices; None if it has no room for one more.

        With images it must read them: it computes the tokens behind the last full block, which may be an image's.
        """
        if not request.follows or request.share is None or request.attempt:
            return None
        worker = self._pool.decodes.get(request.share.decode_address or "")
        if request.images and worker is not None and not worker.reads_images:
            return None
        is_shut = worker is not None and (worker.address,) in self._shut(self._clock())
        fitting = [] if worker is None or is_shut else views([worker], request.max_len)
        if worker is None or not fitting or not fitting[0].takes_sequence(num_tokens_to_hold):
            return None
        return Place(None, worker, Reason.SHARED, num_to_compute=0)


def _cached(request: GenerationRequest, some: Iterable[WorkerView]) -> Mapping[str, int]:
    """Number of leading tokens that a worker need not compute, by address."""
    cached = request.prefix.cached_tokens(request.output, some)
    # The prompt's log probabilities require that all of it is computed.
    return cached if request.next_sampling.num_prompt_logprobs is None else {}


def views(workers: Iterable[Worker], num_tokens: int) -> list[WorkerView]:
    """The usable workers that can hold a request of ``num_tokens``."""
    return [view for worker in workers if (view := worker.view(num_tokens)) is not None]
