"""Chooses a request's workers from their last reports, and the way of its prompt: hand-off from a prefill worker, or local prefill
on a decode worker. Pure functions.

The two ways are compared by when the first token is expected, in seconds from now. For a prompt of ``n`` tokens:

    hand-off = (tokens that wait at the prefill worker + n - its cached tokens) / its speed + 10 ms
    local    = (prompt tokens that wait at the decode worker + n - its cached tokens) / its speed

A prefill worker's speed is what it computes. A decode worker's speed is what it could compute now within its inter-token budget,
beside the sequences that it generates. So a decode worker whose budget is used up takes no prompt, and a busy one loses by itself.
Local prefill must be sooner by a tenth. A near tie goes to the prefill worker, because local prefill slows the sequences that
generate there. On idle pools the decode worker computes short uncached rests itself: the 10 ms of a hand-off are more than a tenth
of a short prompt's time, and less than a tenth of a long one's.

A decode worker that has computed no prompt has no known speed. It is tried with one prompt, at the fastest prefill worker's speed.
While no speed is known, prompts are handed over. If no prefill worker may be used, it is tried all the same.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvrelay.gateway.workers.load import WorkerView

# A decode worker may have this many more tokens in use than others, per cached token, and still get a prompt that is cached
# there.
_IN_USE_PER_CACHED = 4.0
# If all of the prompt is cached there, it may also have this part more of its own tokens in use.
_IN_USE_SLACK = 0.25
# Each prompt token that waits at a decode worker counts as this many tokens in use.
_IN_USE_PER_WAITING = 4.0
# The time for offer, grant, the last blocks and their verification, and for the wait for the decode worker's next step.
_HAND_OFF_S = 0.01
_TIE = 0.1
CLEARLY_SOONER = 0.5  # another way is worth a change if it takes at most this part of the remaining time


class Reason(enum.StrEnum):
    """Why a prompt went its way."""

    SOONER = "sooner"  # the first token is expected sooner than by the other way
    ONLY_WAY = "only_way"  # no decode worker could compute it, or no prefill worker is there
    UNKNOWN = "unknown"  # no speed is known
    SHARED = "shared"  # the decode worker already has the prompt for another choice of it
    TAKEN_BACK = "taken_back"  # the prompt waited at a prefill worker, and the other way became sooner


class Route(msgspec.Struct, frozen=True, gc=False):
    """The chosen pair; without a prefill worker the decode worker computes the prompt."""

    prefill: str | None
    decode: str


Way = tuple[Route, Reason]
"""A prompt's route, and the reason."""


def choose(
    prefills: Sequence[WorkerView],
    decodes: Sequence[WorkerView],
    num_tokens: int,
    sequence_number: int,
    cached: Mapping[str, int],
) -> Route | None:
    """The workers with the longest cached prefix, unless they are clearly more loaded. If nothing is cached: the least loaded.

    Both are costs, and the lowest cost wins; ``sequence_number`` rotates ties. A prefill worker's cost is the number of tokens to
    compute before this prompt's first token, without the prompt's length, which is the same everywhere:

        waiting tokens - cached tokens

    A decode worker's cost, as a part of its pool, if it has room:

        (tokens in use + 4 * waiting prompt tokens) / (1 + 0.25 * cached part of the prompt) - 4 * cached tokens

    So for each cached token, which saves a computation or a transfer, it may have four tokens more in use than others. It may also
    have a quarter more of what is in use; otherwise, among many requests, chance alone would drive chats from their workers. On a
    worker whose batch is full nothing counts as cached. Waiting prompts count because a sequence beside them waits longer for its
    next token. A decode worker without room is taken only if none has room.

    ``cached``: leading prompt tokens that a worker has, by address, as far as this gateway knows (see
    :mod:`kvrelay.gateway.routing.prefixes`). Without ``prefills`` the route has no prefill worker. Returns None if there is no
    decode worker, or no prefill worker whose KV layout fits it.
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
    """The cheapest worker; among equals, another one each time."""
    if len(views) == 1:
        return views[0]
    ordered = sorted(views, key=lambda view: view.address)
    first = sequence_number % len(ordered)
    return min(ordered[first:] + ordered[:first], key=cost)


def with_adapter(views: list[WorkerView], digest: str, has_place: Callable[[WorkerView], bool]) -> list[WorkerView]:
    """The workers that have loaded the adapter, if one of them ``has_place``.

    Otherwise all workers; the chosen one will load it.
    """
    having = [view for view in views if digest in view.adapters]
    return having if any(map(has_place, having)) else views


class Limits(msgspec.Struct, frozen=True, gc=False):
    """How much may wait at workers."""

    prefill_backlog_s: float  # at a prefill worker; infinite: no limit
    local_backlog_s: float | None  # at a decode worker; None: it computes no prompts


def choose_way(
    prefills: Sequence[WorkerView],
    decodes: Sequence[WorkerView],
    num_tokens: int,
    sequence_number: int,
    cached: Mapping[str, int],
    limits: Limits,
) -> Way | None:
    """The way by which a prompt of ``num_tokens`` is expected to have its first token sooner.

    ``prefills``: all usable ones, whatever waits there. ``decodes``: those with room for the sequence. ``cached``: as for
    :func:`choose`. None: there is no place, or the prompt is better off waiting for one.
    """
    local = best_local(prefills, decodes, num_tokens, sequence_number, cached, limits.local_backlog_s)
    if not prefills:
        return None if local is None else (Route(None, local[1]), Reason.ONLY_WAY)
    takers = [view for view in prefills if view.takes_prompt(limits.prefill_backlog_s)]
    route = choose(takers or prefills, decodes, num_tokens + 1, sequence_number, cached)
    hand_off_s = None if route is None else _hand_off_s(prefills, route, num_tokens, cached)
    if local is not None and hand_off_s is not None and local[0] < hand_off_s * (1 - _TIE):
        return Route(None, local[1]), Reason.SOONER
    if route is None or not takers:
        return None
    if local is None:
        return route, Reason.ONLY_WAY
    return route, Reason.UNKNOWN if hand_off_s is None else Reason.SOONER


def best_local(
    prefills: Sequence[WorkerView],
    decodes: Sequence[WorkerView],
    num_tokens: int,
    sequence_number: int,
    cached: Mapping[str, int],
    backlog_s: float | None,
) -> tuple[float, str] | None:
    """The decode worker that would compute the prompt soonest, and in how many seconds; None if no decode worker may.

    A decode worker may if it has blocks and a batch place for the sequence and some of its budget left, and if its waiting prompts
    are computed within ``backlog_s``.
    """
    if backlog_s is None:
        return None
    fastest = max((view.tokens_per_s or 0.0 for view in prefills), default=0.0)
    ways: list[tuple[float, str]] = []
    for view in decodes:
        if (speed := view.tokens_per_s) is not None:
            most_waiting = speed * backlog_s
        else:
            # Without prefill workers there is no speed to assume. With 1.0 such workers rank behind those of known speed.
            speed, most_waiting = fastest or (0.0 if prefills else 1.0), 0.0
        if speed > 0 and view.num_waiting_tokens <= most_waiting and not view.is_full and view.has_room(num_tokens + 1):
            num_to_compute = view.num_waiting_tokens + num_tokens - cached.get(view.address, 0)
            ways.append((num_to_compute / speed, view.address))
    first = sequence_number % len(ways) if ways else 0  # ties go round
    return min(ways[first:] + ways[:first], key=lambda way: way[0], default=None)


def _hand_off_s(
    prefills: Sequence[WorkerView], route: Route, num_tokens: int, cached: Mapping[str, int]
) -> float | None:
    """Seconds until the first token of a prompt sent over ``route`` now; None if the prefill worker's speed is not known."""
    view = next(view for view in prefills if view.address == route.prefill)
    if not view.tokens_per_s:
        return None
    num_to_compute = view.num_waiting_tokens + num_tokens - cached.get(view.address, 0)
    return num_to_compute / view.tokens_per_s + _HAND_OFF_S
