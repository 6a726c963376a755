"""Makes the spans of a trace from a finished request. Pure; contains no text.

The gateway's times are on its own clock. A worker reports only durations, so its spans end when the gateway heard of them:
``prefill`` ends with the first token, ``queue`` where ``prefill`` begins, ``hand_off`` where ``first_step`` begins. The durations
are those that the metrics count. Gaps between spans are the network and the gateway's own work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from kvrelay.gateway.http.request import ApiRequest
from kvrelay.gateway.relay.request import AttemptNote, GenerationRequest
from kvrelay.wire.messages import Timings

Value = str | int | float | tuple[str, ...]

_MAX_SEQUENCES = 8  # sequences of one request that are described in detail
# All other generating routes are chats.
_COMPLETIONS = frozenset({"/v1/completions", "/generate", "/generate_stream", "/"})
# Outcomes of attempts that are no errors.
_WELL_ENDED = frozenset({"finished", "stopped", "moved", "taken_back", "given_up"})


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """A moment within a span."""

    name: str
    at_s: float
    attributes: dict[str, Value]


@dataclass(frozen=True, slots=True)
class Span:
    """Times are on the gateway's monotonic clock."""

    name: str
    begun_s: float
    ended_s: float
    attributes: dict[str, Value] = field(default_factory=dict)
    events: list[SpanEvent] = field(default_factory=list)
    children: list[Span] = field(default_factory=list)
    error: str | None = None  # why it failed, if the client is not at fault


def spans_of(request: ApiRequest, route: str, ended_s: float) -> Span:
    """The spans of a finished request."""
    sequences = request.sequences[:_MAX_SEQUENCES]
    failure = request.cut or (None if request.error is None else request.error.code)
    attributes: dict[str, Value] = {
        "http.request.method": request.method,
        "http.route": route,
        "http.response.status_code": request.status,
        "kvrelay.request_id": request.request_id,
        "kvrelay.outcome": request.outcome,
    }
    name = f"{request.method} {route}"
    if failure is not None:
        attributes["error.type"] = failure
    if sequences:
        operation = "text_completion" if route in _COMPLETIONS else "chat"
        name = f"{operation} {request.model}"
        attributes |= {"gen_ai.operation.name": operation, **_generation(request)}
    root = Span(
        name, request.received_s, ended_s, attributes, error=failure if request.status >= 500 or request.cut else None
    )
    for number, sequence in enumerate(sequences):
        which: dict[str, Value] = {"kvrelay.sequence": number} if len(request.sequences) > 1 else {}
        root.children.append(_accept(request, sequence, which, ended_s, has_text=number == 0))
        notes = sequence.timings.notes
        root.children.extend(_attempt(note, which, ended_s) for note in notes)
        root.events.extend(
            SpanEvent(
                "retry", after.begun_s, {**which, "kvrelay.attempt": after.number, "kvrelay.outcome": before.outcome}
            )
            for before, after in pairwise(notes)
        )
    return root


def _generation(request: ApiRequest) -> dict[str, Value]:
    """What was asked for and generated, under the names of OpenTelemetry's conventions for generative AI."""
    first, sequences = request.sequences[0], request.sequences
    sampling, timings = first.sampling, first.timings
    found: dict[str, Value] = {
        "gen_ai.provider.name": "kvrelay",
        "gen_ai.request.model": request.model,
        "gen_ai.response.model": request.model,
        "gen_ai.request.choice.count": first.spec.num_choices,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.seed": (sampling.seed + 2**63) % 2**64 - 2**63,  # OTLP's numbers have a sign
        "gen_ai.usage.input_tokens": sum(len(one.prompt_token_ids) for one in sequences if one.is_first),
        "gen_ai.usage.cache_read.input_tokens": sum(one.num_cached_tokens or 0 for one in sequences if one.is_first),
        "gen_ai.usage.output_tokens": sum(one.num_output_tokens for one in sequences),
    }
    if timings.first_token_s is not None:
        found["kvrelay.time_to_first_token"] = timings.first_token_s - timings.received_s
    return found


def _accept(
    request: ApiRequest, sequence: GenerationRequest, which: dict[str, Value], ended_s: float, *, has_text: bool
) -> Span:
    """The span ``accept``, until the first attempt is sent, as in the metrics. ``has_text``: the prompt came as text."""
    timings = sequence.timings
    span = Span("accept", timings.received_s, _or(timings.submitted_s, ended_s), dict(which))
    prepared_s = _or(timings.prepared_s, ended_s)
    if has_text and request.read_s is not None:
        tokenize = Span("tokenize", request.read_s, prepared_s)
        if request.fetching_s is not None:
            tokenize.children.append(Span("fetch_images", *request.fetching_s))
        span.children.append(tokenize)
    span.children.append(Span("admission", prepared_s, _or(timings.placed_s, ended_s)))
    return span


def _attempt(note: AttemptNote, which: dict[str, Value], request_ended_s: float) -> Span:
    ended_s = _or(note.ended_s, request_ended_s)
    attributes: dict[str, Value] = {
        **which,
        "kvrelay.attempt": note.number,
        "kvrelay.workers": note.workers,
        "kvrelay.reason": note.reason,
        "kvrelay.outcome": note.outcome,
        "kvrelay.num_output_tokens_before": note.num_output_tokens,
    }
    error = note.outcome if note.outcome not in _WELL_ENDED else None
    if error is not None:
        attributes["error.type"] = error
    is_local = len(note.workers) == 1
    children = [span for at_s, timings in note.heard for span in _parts(at_s, timings, ended_s, is_local=is_local)]
    return Span("attempt", note.begun_s, ended_s, attributes, children=children, error=error)


def _parts(at_s: float, timings: Timings, ended_s: float, *, is_local: bool) -> Iterator[Span]:
    """The spans of durations that a worker measured and the gateway heard at ``at_s``, in an attempt that ended at ``ended_s``."""
    if timings.prefill_s is not None:
        begun_s = at_s - timings.prefill_s
        if timings.queue_s is not None:
            yield Span("queue", begun_s - timings.queue_s, begun_s)
        chunks: list[Span] = []
        for one in timings.chunks:
            # The worker's asyncio thread hears of a step a little late, so a chunk may seem to begin before the prefill.
            start_s = max(begun_s, begun_s + one.begun_s)
            end_s = min(max(start_s, begun_s + one.begun_s + one.duration_s), at_s)
            chunks.append(Span("chunk", start_s, end_s, {"kvrelay.num_tokens": one.num_tokens}))
        yield Span("prefill", begun_s, at_s, children=chunks)
        if is_local:
            yield Span("decode", at_s, ended_s)
    if timings.first_step_s is not None:
        verified_s = at_s - timings.first_step_s
        if timings.transfer_s is not None:
            yield Span("hand_off", verified_s - timings.transfer_s, verified_s)
        yield Span("decode", verified_s, ended_s, children=[Span("first_step", verified_s, at_s)])


def _or(moment_s: float | None, otherwise_s: float) -> float:
    return otherwise_s if moment_s is None else moment_s
