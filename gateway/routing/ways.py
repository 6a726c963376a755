"""Which workers serve a request, by what they last reported, and which way its prompt goes: over a prefill worker and the hand-off,
or to a decode worker that computes it itself. Pure functions.

Both ways are compared by when the first token is to be expected, in seconds from now. For a prompt of ``n`` tokens:

    hand-off = (tokens that wait at the prefill worker + n - what it has cached) / its speed + 10 ms
    local    = (tokens of prompts that wait at the decode worker + n - what it has cached) / its speed

A prefill worker's speed is what it computes; a decode worker's is what it would compute now within its inter-token budget, beside
the sequences that generate there. So a decode worker whose budget is used up takes no prompt, and a busy one loses by itself.
Local prefill must be sooner by a tenth: what is nearly a tie goes to the prefill worker, because a prompt beside sequences that
generate is paid by them. On idle pools this is the rule of "a short rest is computed by the decode worker": the 10 ms of a hand-off
are more than a tenth of a short prompt's time, and less than a tenth of a long one's.

A decode worker that has computed no prompt knows no speed. It is tried with one prompt, at the fastest prefill worker's speed.
While nobody knows a speed, prompts are handed over.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvrelay.gateway.workers.load import WorkerView

# What a decode worker may have more in use than others and still get a prompt that is cached there: for each cached token so many …
_IN_USE_PER_CACHED = 4.0
# … and, if all of the prompt is cached, such a part of what is in use there.
_IN_USE_SLACK = 0.25
# What a decode worker counts as having in use for each token of a prompt that waits to be computed there.
_IN_USE_PER_WAITING = 4.0
# Offer, grant, the last blocks and their verdict, and the wait for the decode worker's next step.
_HAND_OFF_S = 0.01
_TIE = 0.1
CLEARLY_SOONER = (
    0.5  # of the time that is left by the way that was chosen: what is left by another that is worth the change
)


class Reason(enum.StrEnum):
    """Why a prompt went its way."""

    SOONER = "sooner"  # its first token is expected sooner than by the other way
    ONLY_WAY = "only_way"  # no decode worker could compute it, or no prefill worker is there
    UNKNOWN = "unknown"  # nobody knows how fast it would be
    SHARED = "shared"  # the prompt lies on the decode worker, for another choice of it
    TAKEN_BACK = "taken_back"  # it waited at a prefill worker, and the other way had become sooner


class Route(msgspec.Struct, frozen=True, gc=False):
    """The chosen pair; without a prefill worker the decode worker prefills itself."""

    prefill: str | None
    decode: str


Way = tuple[Route, Reason]
"""Where a prompt goes, and why."""


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


def with_adapter(views: list[WorkerView], digest: str, has_place: Callable[[WorkerView], bool]) -> list[WorkerView]:
    """Those that have loaded the adapter, as long as one of them ``has_place``; else all, of whom one will load it."""
    having = [view for view in views if digest in view.adapters]
    return having if any(map(has_place, having)) else views


class Limits(msgspec.Struct, frozen=True, gc=False):
    """What may wait where."""

    prefill_backlog_s: float  # at a prefill worker; infinite: whatever waits there
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

    ``prefills``: all that may be asked, whatever waits there; ``decodes``: those with room for the sequence; ``cached``: as for
    :func:`kvrelay.gateway.routing.ways.choose`. None: there is no place, or the prompt is better off if it waits for one.
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
    """In how many seconds which decode worker would compute the prompt soonest; None if no decode worker may.

    Who may has blocks and a place in its batch for the sequence, is left some of its budget, and computes within ``backlog_s`` what
    waits there.
    """
    if backlog_s is None:
        return None
    fastest = max((view.tokens_per_s or 0.0 for view in prefills), default=0.0)
    ways: list[tuple[float, str]] = []
    for view in decodes:
        if (speed := view.tokens_per_s) is not None:
            most_waiting = speed * backlog_s
        else:
            speed, most_waiting = fastest, 0.0
        if speed > 0 and view.num_waiting_tokens <= most_waiting and not view.is_full and view.has_room(num_tokens + 1):
            num_to_compute = view.num_waiting_tokens + num_tokens - cached.get(view.address, 0)
            ways.append((num_to_compute / speed, view.address))
    first = sequence_number % len(ways) if ways else 0  # ties go round
    return min(ways[first:] + ways[:first], key=lambda way: way[0], default=None)


def _hand_off_s(
    prefills: Sequence[WorkerView], route: Route, num_tokens: int, cached: Mapping[str, int]
) -> float | None:
    """Until the first token of a prompt that is sent that way now; None if the prefill worker's speed is not known."""
    view = next(view for view in prefills if view.address == route.prefill)
    if not view.tokens_per_s:
        return None
    num_to_compute = view.num_waiting_tokens + num_tokens - cached.get(view.address, 0)
    return num_to_compute / view.tokens_per_s + _HAND_OFF_S
