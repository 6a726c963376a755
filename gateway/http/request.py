"""An HTTP request as endpoints get it: with an id, and its body parsed into a model in one pass.

Errors name the field, its value and the limit.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar, Self, TypeVar, get_type_hints

import msgspec
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvrelay.common.fair_queue import MIN_PRIORITY, Flow
from kvrelay.gateway.errors import ApiError, BodyTooLargeError, InvalidRequestError, RequestTimeoutError
from kvrelay.gateway.http.api_keys import KeyLimits, KeyUse
from kvrelay.gateway.relay.request import GenerationRequest
from kvrelay.gateway.text.output import Usage, total

TIMEOUT_HEADER = "x-request-timeout"
SECONDS = r"[0-9]{1,9}(\.[0-9]{0,9})?"

_SECONDS = re.compile(SECONDS)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

# pydantic's names of complaints about a value whose type is right
_BOUNDS = frozenset(
    {
        "too_short", "too_long", "string_too_short", "string_too_long",
        "greater_than", "greater_than_equal", "less_than", "less_than_equal",
    }
)  # fmt: skip

_MAX_COLONS = 100_000  # colons of a body whose unknown fields are still named: each costs part of a microsecond
_MAX_VALUES = 100_000  # commas and brackets of a body that is too large without images: each may cost a microsecond
_ALL_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])

Body = TypeVar("Body", bound="RequestBody")


class ApiRequest(Request):
    """One request from its head on, and its outcome. Other views of the request find it as ``request.state.api_request``."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        super().__init__(scope, receive)
        self.received_s = time.monotonic()
        self.read_s: float | None = None  # when its body had arrived
        self.fetching_s: tuple[float, float] | None = None  # when its images began to be fetched, and when that ended
        self.num_body_bytes = 0  # once its body has arrived
        self.max_body_bytes: float = math.inf  # without images
        self.trace_id = ""  # of the trace that records it; empty: none
        self.model = ""  # the model's own name; "": none was found, or none is needed
        self.key_name: str | None = None  # of its API key
        self.key_limits = KeyLimits(min_priority=MIN_PRIORITY)  # the key's limits when the request came
        self.key_use: KeyUse | None = None  # of its API key
        self._num_reserved = 0  # tokens reserved in the key's budgets
        self.has_left: Callable[[], bool] = lambda: False  # whether its client left before the answer's end
        self.status = 0  # of the answer, once it has begun
        self.cut: str | None = None  # why the answer broke off after its status; a label of the metrics
        self.error: ApiError | None = None  # the error of the answer
        self.sequences: Sequence[GenerationRequest] = ()  # the sequences to generate
        self.usages: Sequence[Usage] = ()  # of each sequence, once they run
        given = self.headers.get("x-request-id", "")
        # A client's id goes into logs and messages, so it must be plain. Two requests may have the same one, so workers get
        # an id with a unique
        # suffix.
        if _REQUEST_ID.fullmatch(given) is not None:
            self.request_id = given
            self.internal_id = f"{given}.{secrets.token_hex(4)}"
        else:
            self.request_id = self.internal_id = secrets.token_hex(12)
        self.state.api_request = self

    @property
    def log_context(self) -> dict[str, Any]:
        """The fields that its log lines carry."""
        return {"request_id": self.request_id, "trace_id": self.trace_id}

    @property
    def outcome(self) -> str:
        """The outcome for logs, traces and metrics: the status, or why there was no answer or no whole one."""
        return self.cut or ("client_left" if self.has_left() or not self.status else str(self.status))

    def fail(self, error: ApiError) -> ApiError:
        """Note ``error`` as this request's answer, and put the request's id into it."""
        self.error, error.request_id = error, self.request_id
        return error

    async def read_body(self) -> bytes:
        """The body, which the request does not keep: with images it is large. Call it once."""
        content = b"".join([chunk async for chunk in self.stream()])
        self.num_body_bytes = len(content)
        return content

    def check_size(self, num_bytes: int) -> None:
        """Raises BodyTooLargeError if ``num_bytes`` are too many for a body, its images not counted."""
        if num_bytes > self.max_body_bytes:
            raise BodyTooLargeError(
                f"the body has {num_bytes} bytes without images; the limit is {self.max_body_bytes}"
            )

    def flow(self, priority: int = 0) -> Flow:
        """The request's flow (its key and priority) for fair queueing. ``priority``: what the body asks for."""
        limits = self.key_limits
        return Flow(self.key_name or "", max(priority, limits.min_priority), limits.weight)

    def reserve(self) -> None:
        """Reserve in the API key's budgets what the ``sequences`` may use. Raises TokenBudgetError and InvalidRequestError.

        A request without ``max_tokens`` reserves all that fits the model, or all that is left in the budget if that is less.
        """
        if self.key_use is None:
            return
        sequences, spec = self.sequences, self.sequences[0].spec
        width = 1 if spec.beam_search is None else spec.beam_search.width
        num_prompt = sum(len(one.prompt_token_ids) for one in sequences if one.is_first)
        most = num_prompt + width * sum(one.sampling.max_tokens for one in sequences)
        least = num_prompt + width * len(sequences) if spec.max_tokens is None else most
        limits, now_s = self.key_limits.tokens, time.monotonic()
        self._num_reserved = self.key_use.budget.reserve(limits, least, most, now_s)

    def check_budget(self) -> None:
        """Raises TokenBudgetError if no token is left in the API key's budgets."""
        if self.key_use is not None:
            self.key_use.budget.reserve(self.key_limits.tokens, 1, 0, time.monotonic())  # 0: nothing is reserved

    def used(self) -> Usage:
        """The tokens that the request costs its API key, once it is over.

        Without a token it costs nothing, unless its client gave it up: workers may have computed its prompts.
        """
        if any(one.timings.first_token_s is not None for one in self.sequences):
            return total(self.sequences, self.usages)
        submitted = [one for one in self.sequences if one.timings.submitted_s is not None]
        if not submitted or not self._was_given_up():
            return Usage(0)
        return Usage(sum(len(one.prompt_token_ids) for one in submitted if one.is_first))

    def settle(self) -> None:
        """Replace the reservation by what the request really used."""
        if self.key_use is not None and self._num_reserved:
            used = self.used()
            num_used = used.num_prompt_tokens + used.num_output_tokens
            self.key_use.budget.settle(self._num_reserved, num_used, time.monotonic())

    def _was_given_up(self) -> bool:
        """Whether the client ended the request: it left without an answer, or the timeout that passed was its own."""
        if self.error is None:
            return self.has_left()
        is_own = self.sequences[0].timeout_s == self.timeout_s()  # otherwise the server's was shorter
        return is_own and isinstance(self.error, RequestTimeoutError)

    def answer_headers(self) -> list[tuple[bytes, bytes]]:
        """The headers of every answer: the request's id, and its API key's limits."""
        limits = [] if self.key_use is None else self.key_use.headers(time.monotonic())
        return [(b"x-request-id", self.request_id.encode()), *limits]

    def timeout_s(self) -> float:
        """The timeout in the request's header; infinite without one. Raises InvalidRequestError if the header is no duration."""
        given = self.headers.get(TIMEOUT_HEADER)
        if given is None:
            return math.inf
        if _SECONDS.fullmatch(given.strip()) is None or float(given) <= 0:
            raise InvalidRequestError(
                f"{TIMEOUT_HEADER} is {given[:80]!r}; it must be a number of seconds above 0, such as 30 or 2.5",
                param=TIMEOUT_HEADER,
            )
        return float(given)


class ApiRoute(APIRoute):
    """A route that passes its body, parsed into the annotated model of ``body``, and an ApiRequest to its endpoint.

    FastAPI would parse the body with ``json`` and validate Python values. That is slower, and strict numbers differ. Endpoints
    without a body are left to FastAPI.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self._model: type[RequestBody] | None = get_type_hints(endpoint).get("body")

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """FastAPI calls this for a request to the route's path."""
        if self._model is None or scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)
            return
        request: ApiRequest = scope["state"]["api_request"]
        content = await request.read_body()
        request.read_s = time.monotonic()
        if len(content) > request.max_body_bytes and sum(map(content.count, (b",", b"[", b"{"))) > _MAX_VALUES:
            request.check_size(len(content))  # raises: it is not images that make it large
        body = parse_body(self._model, request.headers.get("content-type"), content)
        del content
        response: Response = await self.endpoint(body, request)
        del body  # a stream would keep it to its end
        await response(scope, receive, send)


class RequestBody(BaseModel):
    """A client's body. Types are checked strictly; unknown fields are ignored.

    ``/openapi.json`` shows the docstring below a field as its description.
    """

    model_config = ConfigDict(strict=True, extra="ignore", use_attribute_docstrings=True)

    @classmethod
    def of_json(cls, data: bytes) -> Self:
        """Parse ``data``. Raises ValidationError or InvalidRequestError."""
        return cls.model_validate_json(data)


class OpenBody(RequestBody):
    """A body whose answer names unknown fields, and which knows some fields without declaring them."""

    known_extras: ClassVar[frozenset[str]]  # undeclared fields that are not reported as ignored
    _extras: dict[str, Any] = PrivateAttr(default_factory=dict)  # the undeclared known fields of this body
    _ignored: list[str] = PrivateAttr(default_factory=list)

    @classmethod
    def of_json(cls, data: bytes) -> Self:
        """Parse ``data``. Raises ValidationError or InvalidRequestError.

        Unknown fields are skipped without making objects: for a few megabytes of them that would take most of a second.
        """
        declared, decoder = _fields_of(cls)
        try:
            if data.count(b":") <= _MAX_COLONS:
                fields = _ALL_FIELDS.decode(data)
            else:
                known = msgspec.structs.asdict(decoder.decode(data))
                fields = {name: raw for name, raw in known.items() if raw is not None}
            extras = {name: msgspec.json.decode(fields[name]) for name in cls.known_extras & fields.keys()}
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            cls.model_validate_json(data)  # raises an error that says where
            raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
        given = [b'"%b":%b' % (name.encode(), raw) for name, raw in fields.items() if name in declared]
        body = super().of_json(b"{%b}" % b",".join(given))
        body._extras = extras
        body._ignored = [name for name in fields if name not in declared and name not in cls.known_extras]
        return body

    def ignored(self) -> list[str]:
        """The unknown fields; none for a body with more than 100,000 colons."""
        return self._ignored


@cache
def _fields_of(model: type[OpenBody]) -> tuple[frozenset[str], msgspec.json.Decoder[msgspec.Struct]]:
    """The fields that ``model`` declares, and a decoder.

    It reads those and the ``known_extras`` as JSON text, and skips all others.
    """
    declared = frozenset(model.model_fields)
    fields = [(name, msgspec.Raw, None) for name in declared | model.known_extras]
    return declared, msgspec.json.Decoder(msgspec.defstruct("Fields", fields))


def parse_body(model: type[Body], content_type: str | None, body: bytes) -> Body:
    """Parse ``body`` into ``model``. Raises InvalidRequestError."""
    media_type = "application/json" if content_type is None else content_type.partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise InvalidRequestError(f"the body is {media_type[:80]!r} by its header; send content-type: application/json")
    try:
        return model.of_json(body)
    except ValidationError as error:
        raise _complaint(error.errors(include_url=False)) from error


def _complaint(complaints: Sequence[ErrorDetails]) -> InvalidRequestError:
    """An error made of the most telling complaint, with the field, its value and what is allowed."""
    if complaints[0]["type"] == "json_invalid":
        reason = complaints[0].get("ctx", {}).get("error", complaints[0]["msg"])
        if "hex escape" in reason:
            reason += (
                "; \\uXXXX has four hex digits, and \\ud800 to \\udfff come in pairs: is a text cut inside a character?"
            )
        return InvalidRequestError(f"the body is not valid JSON: {reason}")
    # A field of several types has one complaint per type. A bound is only checked where the type fits. Otherwise the type that
    # fits best got furthest into the value.
    complaints = [complaint for complaint in complaints if complaint["type"] in _BOUNDS] or complaints
    deepest = max(len(complaint["loc"]) for complaint in complaints)
    chosen = [complaint for complaint in complaints if len(complaint["loc"]) == deepest]
    names = [str(part) for part in chosen[0]["loc"] if not _is_type_name(part)]
    value = chosen[0].get("input")
    if value == [] and chosen[0]["type"] == "too_short":
        return InvalidRequestError(
            f"{'.'.join(names)} is an empty list; it must have at least one item", param=names[0]
        )
    messages = " or ".join(
        dict.fromkeys(complaint["msg"] for complaint in chosen[:4] if complaint["loc"][:-1] == chosen[0]["loc"][:-1])
    )
    shown = "" if isinstance(value, dict | list) or chosen[0]["type"] == "missing" else f", not {_shown(value)}"
    return InvalidRequestError(f"{'.'.join(names) or 'body'}: {messages}{shown}", param=names[0] if names else "body")


def _shown(value: object) -> str:
    """A value of a body for an error: a text in quotes, anything else as JSON."""
    return repr(value[:80]) if isinstance(value, str) else json.dumps(value)[:80]


def _is_type_name(part: object) -> bool:
    """Whether a part of a location names a type of a union instead of a field."""
    return isinstance(part, str) and (part in ("str", "int") or "[" in part or "constrained" in part)
