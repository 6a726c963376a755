"""An HTTP request as endpoints get it: its body is read, its headers are found by one look-up each, and it has a name.

Starlette's own look goes through all headers for each one that is asked for; a request's way to a worker asks for six.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class ApiRequest(Request):
    """One request to the API, since its head has come."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        super().__init__(scope, receive)
        self.received_s = time.monotonic()
        self.whole_body = b""  # once it has been read
        self.min_priority: int | None = None  # that its API key allows; None: any
        self.cut: str | None = None  # why its answer ended in the middle, behind its status; the metrics' label
        self._fields: dict[bytes, bytes] = dict(reversed(scope["headers"]))  # the first one of a name counts
        given = self.field(b"x-request-id")
        # An id from outside goes into logs and messages: only what is plainly an id is taken.
        is_given = given is not None and _REQUEST_ID.fullmatch(given) is not None
        self.request_id: str = given if is_given and given is not None else os.urandom(12).hex()
        self._internal_id = None if is_given else self.request_id
        scope.setdefault("state", {})["request_id"] = self.request_id

    def field(self, name: bytes) -> str | None:
        """The header of that name, in lower case."""
        value = self._fields.get(name)
        return None if value is None else value.decode("latin-1")

    @property
    def internal_id(self) -> str:
        """Its id, with something of its own if it came from outside: the same may come twice at a time, workers go by ids."""
        if self._internal_id is None:
            self._internal_id = f"{self.request_id}.{secrets.token_hex(4)}"
        return self._internal_id


Endpoint = Callable[[ApiRequest], Awaitable[ASGIApp]]
"""What answers requests to one path; the answer is sent as an ASGI application would send it. Raises ApiError."""
