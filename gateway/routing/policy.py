"""Which workers serve a request: pure functions of the workers' last reported state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvrelay.gateway.workers.view import WorkerView

# What a decode worker may have more in use than others and still get a prompt that is cached there: for each cached token so many …
_IN_USE_PER_CACHED = 4.0
# … and, if all of the prompt is cached, such a part of what is in use there.
_IN_USE_SLACK = 0.25
# What a decode worker counts as having in use for each token of a prompt that waits to be computed there.
_IN_USE_PER_WAITING = 4.0


class Route(msgspec.Struct, frozen=True, gc=False):
    """The chosen pair; without a prefill worker the decode worker prefills itself."""

    prefill: str | None
    decode: str


def choose(
    prefills: Sequence[WorkerView],
    decodes: Sequence[WorkerView],
    num_tokens: int,
    sequence_number: int,
    cached: Mapping[str, int],
) -> Route | None:
    """The workers that have the longest prefix, unless they are clearly more loaded; where nothing is cached, the least loaded.

    Both are costs, and the lowest wins; ties go round by ``sequence_number``. Of a prefill worker: the tokens to compute before
    this prompt has its first one, so

        tokens that wait - cached tokens

    (the prompt's length is the same everywhere). Of a decode worker with room, as parts of its pool:

        (tokens in use + 4 * tokens of prompts that wait) / (1 + 0.25 * cached part of the prompt) - 4 * cached tokens

    So it may have four tokens more in use than others for each cached one, which spares a computation or a transfer, and a quarter
    more of what is in use: among many requests chance alone would else drive chats from their workers. On a worker whose batch
    is full nothing counts as cached. Prompts that wait there count, as who joins a batch beside them waits longer for its next
    token. A decode worker without room is only taken if none has any.

    ``cached``: leading tokens of the prompt that a worker has, by address, as far as this gateway knows (see
    :mod:`kvrelay.gateway.routing.prefixes`). Without ``prefills`` the route has no prefill worker. None if there is no decode
    worker, or no prefill worker whose KV fits it.
    """

    def decode_cost(view: WorkerView) -> tuple[bool, float, int]:
        num_cached = 0 if view.is_full else cached.get(view.address, 0)
        num_used = (
            view.num_blocks - view.num_free_blocks + _IN_USE_PER_WAITING * view.num_waiting_tokens / view.block_size
        )
        used = num_used / (1 + _IN_USE_SLACK * num_cached / num_tokens)
        cost = (used - _IN_USE_PER_CACHED * num_cached / view.block_size) / view.num_blocks
        return (not view.has_room(num_tokens), cost, view.num_requests)

    def prefill_cost(view: WorkerView) -> tuple[int, int]:
        return (view.num_waiting_tokens - cached.get(view.address, 0), view.num_requests)

    if prefills:
        fingerprints = {view.fingerprint for view in prefills}
        decodes = [view for view in decodes if view.fingerprint in fingerprints]
    if not decodes:
        return None
    decode = _first(decodes, sequence_number, decode_cost)
    if not prefills:
        return Route(None, decode.address)
    fitting = [view for view in prefills if view.fingerprint == decode.fingerprint]
    return Route(_first(fitting, sequence_number, prefill_cost).address, decode.address)


def _first(
    views: Sequence[WorkerView], sequence_number: int, cost: Callable[[WorkerView], tuple[Any, ...]]
) -> WorkerView:
    """The one that costs least; of several, another one each time."""
    if len(views) == 1:
        return views[0]
    ordered = sorted(views, key=lambda view: view.address)
    first = sequence_number % len(ordered)
    return min(ordered[first:] + ordered[:first], key=cost)
