"""Which way a prompt goes: over a prefill worker and the hand-off, or to a decode worker that computes it itself. Pure.

Both ways are compared by when the first token is to be expected, in seconds from now. For a prompt of ``n`` tokens:

    hand-off = (tokens that wait at the prefill worker + n - what it has cached) / its speed + 10 ms
    local    = (tokens of prompts that wait at the decode worker + n - what it has cached) / its speed

A prefill worker's speed is what it computes; a decode worker's is what it would compute now within its inter-token budget, beside
the sequences that generate there. So a decode worker whose budget is used up takes no prompt, and a busy one loses by itself.
Local prefill must be sooner by a tenth: what is nearly a tie goes to the prefill worker, because a prompt beside sequences that
generate is paid by them. On idle pools this is the rule of "a short rest is computed by the decode worker": the 10 ms of a hand-off
are more than a tenth of a short prompt's time, and less than a tenth of a long one's.

A decode worker that has computed no prompt knows no speed. It is tried if no other prompt waits there: at a prefill worker's speed
if it is idle, else at a quarter of it. While nobody knows a speed, prompts are handed over.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

import msgspec

from kvrelay.gateway.routing.policy import Route, choose
from kvrelay.gateway.workers.view import WorkerView

# Offer, grant, the last blocks and their verdict, and the wait for the decode worker's next step.
_HAND_OFF_S = 0.01
_TIE = 0.1
_TRIED_AT = 0.25  # of a prefill worker's speed: what a budget may leave of it
_CLEARLY = 0.5  # of the time that is left by the way that was chosen: what is left by another that is worth the change


class Reason(enum.StrEnum):
    """Why a prompt went its way."""

    SOONER = "sooner"  # its first token is expected sooner than by the other way
    ONLY_WAY = "only_way"  # no decode worker could compute it, or no prefill worker is there
    UNKNOWN = "unknown"  # nobody knows how fast it would be
    SHARED = "shared"  # the prompt lies on the decode worker, for another choice of it
    TAKEN_BACK = "taken_back"  # it waited at a prefill worker, and the other way had become sooner


class Way(msgspec.Struct, frozen=True, gc=False):
    """Where a prompt goes, and why."""

    route: Route
    reason: Reason


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
    :func:`kvrelay.gateway.routing.policy.choose`. None: there is no place, or the prompt is better off if it waits for one.
    """
    local = best_local(prefills, decodes, num_tokens, sequence_number, cached, limits.local_backlog_s)
    if not prefills:
        return None if local is None else Way(Route(None, local.address), Reason.ONLY_WAY)
    takers = [view for view in prefills if view.takes_prompt(limits.prefill_backlog_s)]
    route = choose(takers or prefills, decodes, num_tokens + 1, sequence_number, cached)
    hand_off_s = None if route is None else _hand_off_s(prefills, route, num_tokens, cached)
    if local is not None and hand_off_s is not None and local.first_token_s < hand_off_s * (1 - _TIE):
        return Way(Route(None, local.address), Reason.SOONER)
    if route is None or not takers:
        return None
    if local is None:
        return Way(route, Reason.ONLY_WAY)
    return Way(route, Reason.UNKNOWN if hand_off_s is None else Reason.SOONER)


class LocalWay(msgspec.Struct, frozen=True, gc=False):
    """The best decode worker for a prompt without a hand-off."""

    address: str
    first_token_s: float  # from now


def is_clearly_sooner(local: LocalWay, hand_off_s: float) -> bool:
    """Whether a prompt that waits for its first token for ``hand_off_s`` more should be taken back: it would wait half as long."""
    return local.first_token_s < hand_off_s * _CLEARLY


def best_local(
    prefills: Sequence[WorkerView],
    decodes: Sequence[WorkerView],
    num_tokens: int,
    sequence_number: int,
    cached: Mapping[str, int],
    backlog_s: float | None,
) -> LocalWay | None:
    """The decode worker that would compute the prompt soonest; None if no decode worker may.

    Who may has blocks and a place in its batch for the sequence, is left some of its budget, and computes within ``backlog_s`` what
    waits there.
    """
    if backlog_s is None:
        return None
    fastest = max((view.tokens_per_s or 0.0 for view in prefills), default=0.0)
    ways: list[LocalWay] = []
    for view in decodes:
        if (speed := view.tokens_per_s) is not None:
            most_waiting = speed * backlog_s
        else:
            speed, most_waiting = fastest * (_TRIED_AT if view.num_requests else 1.0), 0.0
        if speed > 0 and view.num_waiting_tokens <= most_waiting and not view.is_full and view.has_room(num_tokens + 1):
            num_to_compute = view.num_waiting_tokens + num_tokens - cached.get(view.address, 0)
            ways.append(LocalWay(view.address, num_to_compute / speed))
    first = sequence_number % len(ways) if ways else 0  # ties go round
    return min(ways[first:] + ways[:first], key=lambda way: way.first_token_s, default=None)


def _hand_off_s(
    prefills: Sequence[WorkerView], route: Route, num_tokens: int, cached: Mapping[str, int]
) -> float | None:
    """Until the first token of a prompt that is sent that way now; None if the prefill worker's speed is not known."""
    view = next(view for view in prefills if view.address == route.prefill)
    if not view.tokens_per_s:
        return None
    num_to_compute = view.num_waiting_tokens + num_tokens - cached.get(view.address, 0)
    return num_to_compute / view.tokens_per_s + _HAND_OFF_S
