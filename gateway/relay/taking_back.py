"""A prompt that waits at a prefill worker may be taken back and sent the other way, once that has become clearly sooner.

Now and then an attempt without a first token looks whether a decode worker would compute its prompt clearly sooner
(:meth:`kvrelay.gateway.relay.placement.Placement.sooner`). If one would, it asks its prefill worker for the prompt, at most once in
the life of a request::

    LOOKING ──asks──▶ ASKED ──Withdrawn──▶ (the attempt is over, and the next one goes to the decode worker)
       │               ├──no answer for a second──▶ UNANSWERED ──Withdrawn──▶ (over too, and the next one is routed anew)
       └───────────────┴─────────────────────────────┴──first token, or the attempt's end──▶ OVER

The place at the decode worker is kept while ASKED, so that others do not take it for free. A prefill worker that has begun with
the prompt does not answer: the attempt goes on. Lives on the gateway's asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvrelay.gateway.relay.request import GenerationRequest, Place
from kvrelay.gateway.workers.load import Key
from kvrelay.gateway.workers.pool import WorkerPool
from kvrelay.gateway.workers.worker import Worker
from kvrelay.wire.messages import Withdraw

_LOOK_S = 0.5  # how often to look for a sooner place
_ANSWER_S = 1.0  # how long a place is kept for the answer; a worker answers between two steps

FindSooner = Callable[[Worker, Key], Place | None]
"""Finds a place that would compute the prompt of this attempt at a prefill worker clearly sooner; None if there is none."""


class TakingBack:
    """The taking back of one attempt's prompt. The owner must call ``end``."""

    def __init__(
        self, pool: WorkerPool, request: GenerationRequest, key: Key, prefill: Worker, find: FindSooner
    ) -> None:
        self._pool = pool
        self._request = request
        self._key = key
        self._next_key = (key[0], key[1] + 1)
        self._prefill = prefill
        self._find = find
        self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)
        self.place: Place | None = None  # the place that is kept

    def end(self) -> None:
        """Stop looking and give the kept place back: the prompt is computed, or the attempt is over."""
        self._timer.cancel()
        self._give_place_back()

    def _look(self) -> None:
        place = self._find(self._prefill, self._key)
        if place is None or not self._prefill.client.send(Withdraw(request_id=self._key[0], attempt=self._key[1])):
            self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)
            return
        self._request.was_asked_back = True
        self.place = place
        self._pool.keep_place(self._next_key, place.decode, self._request.num_tokens + 1, place.num_to_compute)
        self._timer = asyncio.get_running_loop().call_later(_ANSWER_S, self._give_place_back)

    def _give_place_back(self) -> None:
        if self.place is not None:
            self._pool.give_place_back(self._next_key, self.place.decode)
            self.place = None
