"""How the gateway answers one HTTP request: with one JSON body, or with server-sent events.

The status line is sent with the first tokens. So an error before them is a proper HTTP error. A later error becomes one error event
in the stream; a stream never ends without a reason.
"""

from __future__ import annotations

import abc
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvrelay.common.images import PromptImage
from kvrelay.common.sampling import GuideKind, SampledToken
from kvrelay.gateway.apis.prompts import prompt_of
from kvrelay.gateway.chat.dialect import Chat
from kvrelay.gateway.errors import ApiError, ClientBehindError
from kvrelay.gateway.http.request import ApiRequest
from kvrelay.gateway.http.sse import EventStream
from kvrelay.gateway.model import Model, Models
from kvrelay.gateway.relay.image_texts import Patience
from kvrelay.gateway.relay.request import TIMINGS_HEADER, GenerationRequest, GenerationSpec
from kvrelay.gateway.text.output import TextDelta, Usage, total

logger = logging.getLogger(__name__)

IGNORED_HEADER = "x-ignored-fields"

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # other names appear in no header and no log
_MAX_SHOWN = 16  # names shown in a header
_MAX_LOGGED = 256  # names remembered as logged


@dataclass(frozen=True, slots=True)
class Choice:
    """One complete answer of several."""

    index: int
    deltas: list[TextDelta]

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join([delta.text for delta in self.deltas])

    @property
    def tokens(self) -> list[SampledToken]:
        """All tokens."""
        return [token for delta in self.deltas for token in delta.tokens]

    @property
    def mean_logprob(self) -> float:
        """The mean log probability of the tokens; the best choice has the highest."""
        return sum(token.logprob or 0.0 for token in self.tokens) / max(1, len(self.tokens))

    @property
    def prompt_logprobs(self) -> list[SampledToken] | None:
        """The log probabilities of this choice's prompt, if it has them."""
        return next((delta.prompt_logprobs for delta in self.deltas if delta.prompt_logprobs is not None), None)


class Format(abc.ABC):
    """How one route writes one answer. ``index`` numbers the choices. Methods that write events return bytes, perhaps none."""

    def opening(self, usage: Usage) -> bytes:
        """Events before the first text. ``usage``: of all choices so far."""
        return b""

    @abc.abstractmethod
    def chunk(self, index: int, delta: TextDelta, usage: Usage) -> bytes:
        """Events for the new text of one choice. ``usage``: of the choice's prompt and its output so far."""

    def closing(self, usage: Usage, extras: dict[str, object]) -> bytes:
        """Events after the last text. ``extras``: fields beside the usage that only kvrelay's own clients ask for."""
        return b""

    @abc.abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """Events that end a stream after an error."""

    @abc.abstractmethod
    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any] | list[Any]:
        """The body of an answer that is not streamed."""


def served_models(request: Request) -> Models:
    """The models of the application that handles ``request``."""
    models: Models = request.app.state.models
    return models


def model_for(request: ApiRequest, name: str | None, conversation: Callable[[], str]) -> Model:
    """The model that a body names, noted as the request's. Raises ModelNotFoundError.

    ``conversation``: what the requests of one conversation have in common, for aliases that several models share.
    """
    model = served_models(request).find(name, conversation)
    request.model = model.name
    return model


def sequences_of(
    model: Model,
    request: ApiRequest,
    prompts: Sequence[Sequence[int]],
    spec: GenerationSpec,
    prompt_param: str,
    images: tuple[PromptImage, ...] = (),
    patience: Patience | None = None,
) -> list[GenerationRequest]:
    """The sequences that an HTTP request asks ``model`` to generate, reserved in its API key's budgets.

    ``images``: of each prompt. ``patience``: what went by of the request's time.
    Raises InvalidRequestError naming the wrong field or header, and TokenBudgetError.
    """
    request.sequences = sequences = model.sequences(
        prompts,
        spec,
        request_id=request.internal_id,
        received_s=request.received_s,
        prompt_param=prompt_param,
        timeout_s=request.timeout_s(),
        trace_id=request.trace_id,
        flow=request.flow(spec.priority),
        images=images,
    )
    if patience is not None:
        for one in sequences:
            one.waited_s, one.spent_s = patience.waited_s, patience.spent_s
    request.reserve()
    return sequences


async def chat_of(
    model: Model,
    request: ApiRequest,
    prepare: Callable[[], tuple[GenerationSpec, Chat]],
    prompt_param: str,
    *,
    add_special_tokens: bool = False,
) -> tuple[Chat, list[GenerationRequest]]:
    """The chat that an HTTP request asks ``model`` for, and its sequences. ``prepare`` reads the body; it may take long, so it runs
    on a thread if the body is large.
    Raises InvalidRequestError naming the wrong field or header, TokenBudgetError, and what ``prompt_of`` raises.
    """
    patience = Patience(request.flow(), request.timeout_s())

    def read() -> tuple[Chat, GenerationSpec]:
        spec, chat = prepare()
        patience.flow = request.flow(spec.priority)
        is_json = spec.guide is not None and spec.guide.kind in (GuideKind.JSON_OBJECT, GuideKind.JSON_SCHEMA)
        return replace(chat, is_json=is_json), chat.guided(spec)

    def encode(text: str) -> list[int]:
        return model.encode(text, prompt_param, add_special_tokens=add_special_tokens)

    chat, spec, prompt = await prompt_of(model, read, encode, request.num_body_bytes, request, patience)
    return chat, sequences_of(model, request, [prompt.token_ids], spec, prompt_param, prompt.images, patience)


async def respond(
    request: ApiRequest,
    model: Model,
    sequences: Sequence[GenerationRequest],
    written: Format,
    *,
    is_stream: bool,
    ignored: Sequence[str] = (),
) -> Response:
    """Run ``sequences`` and answer. An error before the status line is raised as ApiError, here or when the response is sent.

    ``ignored``: unknown fields of the body.
    """
    fields: IgnoredFields = request.app.state.ignored_fields
    headers = fields.headers(ignored)
    request.usages = usages = [Usage(len(one.prompt_token_ids)) for one in sequences]

    def extras() -> dict[str, object]:
        """What only kvrelay's clients ask for, once the answer is complete: the first choice's timings."""
        return {"kvrelay": sequences[0].timings.body()} if request.headers.get(TIMINGS_HEADER) == "1" else {}

    async def produce(stream: EventStream) -> bytes:
        """Write the events, up to the last ones, which are returned."""

        def take(index: int, delta: TextDelta) -> None:
            before = b"" if stream.has_begun else written.opening(total(sequences, usages))
            stream.write(before + written.chunk(index, delta, usages[index]))

        try:
            await model.run(sequences, usages, take)
            return written.closing(total(sequences, usages), extras())
        except Exception as error:
            if not stream.has_begun:
                raise
            request.cut = "client_behind" if isinstance(error, ClientBehindError) else "failed_mid_stream"
            if isinstance(error, ApiError):
                return written.failed(request.fail(error))
            logger.exception("a stream failed", extra=sequences[0].log_context)
            failure = ApiError("the server failed while it was answering; try again")
            return written.failed(request.fail(failure))

    if is_stream:
        return EventStream(produce, written.failed, headers)
    deltas: list[list[TextDelta]] = [[] for _ in sequences]
    await model.run(sequences, usages, lambda index, delta: deltas[index].append(delta))
    body = written.whole(choose(sequences, deltas), total(sequences, usages))
    return JSONResponse({**body, **extras()} if isinstance(body, dict) else body, headers=headers)


def choose(sequences: Sequence[GenerationRequest], deltas: Sequence[Sequence[TextDelta]]) -> list[Choice]:
    """The answer's choices: all results of a beam search, else the best choices of each prompt by log probability per token.

    Numbered.
    """
    spec = sequences[0].spec
    chosen: list[list[TextDelta]] = []
    for first in range(0, len(deltas), spec.num_sequences):
        group = [list(one) for one in deltas[first : first + spec.num_sequences]]
        if spec.beam_search is not None:
            chosen += [[beam] for one in group for beam in sorted(one, key=lambda delta: delta.beam)]
            continue
        prompt_logprobs = Choice(0, group[0]).prompt_logprobs
        if spec.num_choices < len(group):
            group.sort(key=lambda one: Choice(0, one).mean_logprob, reverse=True)
        for one in group[: spec.num_choices]:
            one[0] = msgspec.structs.replace(one[0], prompt_logprobs=prompt_logprobs)
            chosen.append(one)
    return [Choice(index, list(one)) for index, one in enumerate(chosen)]


class IgnoredFields:
    """Unknown fields of bodies. A header tells the client about them, and the log tells the operator once for each name."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def headers(self, names: Sequence[str]) -> dict[str, str]:
        """The headers that name the ignored fields; logs names that are new."""
        if not names:
            return {}
        plain = [name for name in names if _PLAIN_NAME.fullmatch(name)]
        shown = plain[:_MAX_SHOWN]
        for name in shown:
            if name not in self._logged and len(self._logged) < _MAX_LOGGED:
                self._logged.add(name)
                logger.warning("requests have a field %r, which means nothing here; it is ignored", name)
        num_more = len(names) - len(shown)
        return {IGNORED_HEADER: ", ".join([*shown, f"and {num_more} more"] if num_more else shown)}
