"""A gateway's current state in two structs: the roster of workers, which changes rarely, and their state, which is short.

Pure: made from the gateway's objects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from kvrelay import __version__
from kvrelay.gateway.desk.figures import Figures
from kvrelay.gateway.desk.records import Records, RequestRecord
from kvrelay.gateway.model import Models
from kvrelay.gateway.relay.request import AttemptNote
from kvrelay.gateway.routing.breaker import BreakerState
from kvrelay.gateway.workers.worker import Worker

WINDOW_S = 10.0
_NUM_FLOWS = 64
_NUM_PAIRS = 16
_NUM_ERRORS = 6


class Known(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker of the roster."""

    address: str
    role: str
    model: str
    name: str = ""  # its own name, once it was up
    num_blocks: int = 0
    max_running: int = 0
    problem: str = ""  # why it is not used; empty if it is


class Roster(msgspec.Struct, frozen=True, kw_only=True):
    """The known workers."""

    version: str
    models: list[str]
    workers: list[Known]  # referred to by their index


class Load(msgspec.Struct, frozen=True, array_like=True):
    """What one worker last reported."""

    state: str  # up, leaving, misfit, down
    breaker: str  # closed, open, probing
    num_running: int
    num_waiting: int
    num_waiting_tokens: int  # of prompts
    num_used_blocks: int  # neither free nor only cached
    prompt_tokens_per_s: int | None


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The current state, and figures of the last seconds."""

    at: float  # seconds since 1970
    num_running: int  # requests with a place on workers
    num_queued: int
    figures: Figures
    workers: list[Load]  # in the order of the roster
    flows: list[tuple[int, int, int]]  # prompts begun lately: prefill worker (-1: none), decode worker, tokens a second
    pairs: list[tuple[int, int, str]]  # pairs whose breaker is not closed: both workers, and the breaker's state
    errors: list[tuple[float, str, int, str]]  # time, request id, status, what happened


def roster(models: Models) -> Roster:
    """The known workers."""
    return Roster(
        version=__version__,
        models=[model.name for model in models],
        workers=[_known(model, worker) for model, worker, _ in _all(models)],
    )


def state(models: Models, records: Records, figures: Figures, now_s: float) -> State:
    """The current state. ``now_s``: on the clock of requests."""
    pairs = _suspect_pairs(models)
    indices = {worker.address: index for index, (_, worker, _) in enumerate(_all(models))}
    # Under much load the kept requests reach less far back than the window.
    since_s = max(now_s - WINDOW_S, records.kept_since_s)
    flows: Counter[tuple[int, int]] = Counter()
    for note, num_tokens in _begun(records, since_s):
        prefill, decode = indices.get(note.workers[0]), indices.get(note.workers[-1])
        if prefill is not None and decode is not None:
            flows[-1 if len(note.workers) == 1 else prefill, decode] += num_tokens
    return State(
        at=round(records.wall_s(now_s), 1),
        num_running=sum(model.relay.admission.num_running for model in models),
        num_queued=sum(model.relay.admission.num_queued for model in models),
        figures=figures,
        workers=[_load(worker, breaker) for _, worker, breaker in _all(models)],
        flows=[(*pair, round(num / max(now_s - since_s, 1e-9))) for pair, num in flows.most_common(_NUM_FLOWS)],
        pairs=[
            (indices[prefill], indices[decode], breaker)
            for prefill, decode, breaker in pairs
            if prefill in indices and decode in indices
        ][:_NUM_PAIRS],
        errors=[
            (round(records.wall_s(one.ended_s or 0.0), 1), one.request_id[:64], one.status, _what(one))
            for one, _ in zip(records.failed, range(_NUM_ERRORS), strict=False)
        ],
    )


def described(models: Models) -> dict[str, Any]:
    """The full state for people and programs that ask once: each model, and each worker by name, with what attempts taught about
    it.
    """
    ways = sum((model.relay.prompt_ways for model in models), Counter[tuple[str, str]]())
    return {
        "models": [
            {
                "model": model.name,
                "num_running": model.relay.admission.num_running,
                "num_queued": model.relay.admission.num_queued,
                "problems": [*model.pool.absent, *model.pool.not_ready()],
            }
            for model in models
        ],
        "workers": [
            msgspec.structs.asdict(_known(model, worker)) | msgspec.structs.asdict(_load(worker, breaker))
            for model, worker, breaker in _all(models)
        ],
        "pairs": [
            {"prefill": prefill, "decode": decode, "breaker": breaker}
            for prefill, decode, breaker in _suspect_pairs(models)
        ],
        "num_queued": sum(model.relay.admission.num_queued for model in models),
        "prompt_ways": {f"{way}: {reason}": number for (way, reason), number in sorted(ways.items())},
    }


def _all(models: Models) -> Iterator[tuple[str, Worker, BreakerState]]:
    """Every worker with its model's name and the state of its breaker."""
    for model in models:
        breakers = model.relay.breakers.states()
        for worker in model.pool.workers:
            yield model.name, worker, breakers.get((worker.address,), BreakerState.CLOSED)


def _suspect_pairs(models: Models) -> list[tuple[str, str, str]]:
    """Pairs of addresses whose breaker is not closed, and the breaker's state."""
    states = (pair for model in models for pair in model.relay.breakers.states().items())
    return [
        (part[0], part[1], breaker.value)
        for part, breaker in states
        if len(part) == 2 and breaker is not BreakerState.CLOSED
    ]


def _known(model: str, worker: Worker) -> Known:
    welcome, status = worker.welcome, worker.status
    return Known(
        address=worker.address,
        role=worker.role.value,
        model=model,
        name=worker.name,
        num_blocks=0 if welcome is None else welcome.card.num_blocks,
        max_running=0 if status is None else status.max_running,
        problem=worker.misfit or ("" if welcome is not None else worker.problem),
    )


def _load(worker: Worker, breaker: BreakerState) -> Load:
    status = worker.status
    name = "up" if worker.is_usable else "misfit" if worker.misfit else "down" if worker.welcome is None else "leaving"
    if status is None:
        return Load(name, breaker.value, 0, 0, 0, 0, None)
    return Load(
        name,
        breaker.value,
        status.num_running,
        status.num_waiting,
        status.num_waiting_tokens,
        status.num_blocks - status.num_free_blocks,
        None if status.prompt_tokens_per_s is None else round(status.prompt_tokens_per_s),
    )


def _begun(records: Records, since_s: float) -> Iterator[tuple[AttemptNote, int]]:
    """Attempts that began after ``since_s``, with the number of prompt tokens to compute, if known."""
    for request in records.running:  # of perhaps thousands, most began long ago
        for sequence in request.sequences:
            notes = sequence.timings.notes
            if notes and notes[-1].begun_s >= since_s:
                num_tokens = len(sequence.prompt_token_ids) - (sequence.num_cached_tokens or 0)
                yield from ((note, num_tokens) for note in _lately(notes, since_s))
    for record in records.ended:
        if record.ended_s is not None and record.ended_s < since_s:
            return
        for one in record.sequences:
            num_tokens = one.num_prompt_tokens - (one.num_cached_tokens or 0)
            yield from ((note, num_tokens) for note in _lately(one.timings.notes, since_s))


def _lately(notes: Iterable[AttemptNote], since_s: float) -> Iterator[AttemptNote]:
    return (note for note in notes if note.begun_s >= since_s)


def _what(record: RequestRecord) -> str:
    """What went wrong: as the client saw it, else what the client did not see."""
    if (seen := record.error or record.cut) is not None:
        return seen
    outcomes = [note.outcome for one in record.sequences for note in one.timings.notes if one.num_failures]
    failure = next((one for one in outcomes if one not in ("finished", "stopped", "moved", "taken_back")), None)
    return "" if failure is None else f"answered after {failure}"
