"""An HTTP request as endpoints get it, and the routes that give it to them: its body is read as a model, and it has a name."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvrelay.gateway.bodies import parse_body

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

Body = TypeVar("Body", bound=BaseModel)


class ApiRequest(Request):
    """One request, since its head has come, and what became of it. ``request.state.api_request`` of whoever has another view."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        super().__init__(scope, receive)
        self.received_s = time.monotonic()
        self.min_priority: int | None = None  # that its API key allows; None: any
        self.status = 0  # of its answer, once that has begun
        self.cut: str | None = None  # why its answer ended in the middle, behind its status; the metrics' label
        given = self.headers.get("x-request-id")
        # An id from outside goes into logs and messages: only what is plainly an id is taken.
        is_given = given is not None and _REQUEST_ID.fullmatch(given) is not None
        self.request_id: str = given if is_given and given is not None else os.urandom(12).hex()
        self._internal_id = None if is_given else self.request_id
        self.state.api_request = self

    @property
    def internal_id(self) -> str:
        """Its id, with something of its own if it came from outside: the same may come twice at a time, workers go by ids."""
        if self._internal_id is None:
            self._internal_id = f"{self.request_id}.{secrets.token_hex(4)}"
        return self._internal_id

    async def read(self, model: type[Body]) -> Body:
        """Its body, as often as it is asked for. Raises InvalidRequestError."""
        return parse_body(model, self.headers.get("content-type"), await self.body())


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
        response: Response = await self.endpoint(await request.read(self._model), request)
        await response(scope, receive, send)
