"""An HTTP request as endpoints get it, and the routes that give it to them: its body is read as a model, and it has a name."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from typing import Any, get_type_hints

from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvrelay.gateway.errors import InvalidRequestError
from kvrelay.gateway.http.bodies import parse_body

TIMEOUT_HEADER = "x-request-timeout"
SECONDS = r"[0-9]{1,9}(\.[0-9]{0,9})?"

_SECONDS = re.compile(SECONDS)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class ApiRequest(Request):
    """One request, since its head has come, and what became of it. ``request.state.api_request`` of whoever has another view."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        super().__init__(scope, receive)
        self.received_s = time.monotonic()
        self.min_priority: int | None = None  # that its API key allows; None: any
        self.status = 0  # of its answer, once that has begun
        self.cut: str | None = None  # why its answer ended in the middle, behind its status; the metrics' label
        given = self.headers.get("x-request-id", "")
        # An id from outside goes into logs and messages, so only what is plainly one is taken; and the same may come twice at a
        # time, so workers, which go by ids, get one with something of its own.
        if _REQUEST_ID.fullmatch(given) is not None:
            self.request_id = given
            self.internal_id = f"{given}.{secrets.token_hex(4)}"
        else:
            self.request_id = self.internal_id = secrets.token_hex(12)
        self.state.api_request = self

    def timeout_s(self) -> float | None:
        """What the client gives the request, by its header. Raises InvalidRequestError if that is no time."""
        given = self.headers.get(TIMEOUT_HEADER)
        if given is not None and (_SECONDS.fullmatch(given.strip()) is None or float(given) <= 0):
            raise InvalidRequestError(
                f"{TIMEOUT_HEADER} is {given[:80]!r}; it must be a number of seconds above 0, such as 30 or 2.5",
                param=TIMEOUT_HEADER,
            )
        return None if given is None else float(given)


class ApiRoute(APIRoute):
    """A route whose endpoint is called with its body, as the model that ``body`` is annotated with, and with an ApiRequest.

    FastAPI would read the body by ``json``, and check Python's values: other numbers are strict there, and it takes longer.
    Endpoints without a body are FastAPI's matter.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self._model: type[BaseModel] | None = get_type_hints(endpoint).get("body")

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Called by FastAPI for a request to its path."""
        if self._model is None or scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)
            return
        request: ApiRequest = scope["state"]["api_request"]
        body = parse_body(self._model, request.headers.get("content-type"), await request.body())
        response: Response = await self.endpoint(body, request)
        await response(scope, receive, send)
