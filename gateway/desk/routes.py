"""The operators' routes: ``/console`` and its files, ``/debug/live``, ``/debug/workers`` and ``/debug/requests``.

The console's files contain no data, so they need no key; the ``/debug/`` routes do. The page fetches nothing from other hosts. Its
links are relative because a proxy may add a path prefix.
"""

from __future__ import annotations

from importlib import resources
from typing import Annotated

import msgspec
from fastapi import FastAPI, Path
from starlette.requests import Request
from starlette.responses import Response

from kvrelay.gateway.apis.answer_docs import ErrorBody, errors_as
from kvrelay.gateway.desk.feed import Feed
from kvrelay.gateway.desk.records import NUM_KEPT, Records
from kvrelay.gateway.desk.snapshot import described
from kvrelay.gateway.errors import InvalidRequestError, NotFoundError
from kvrelay.gateway.http.edge import CONSOLE
from kvrelay.gateway.http.sse import EventStream, sse
from kvrelay.gateway.model import Models

_REFUSED = errors_as(ErrorBody, {"4XX": "With the reason"})
_MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "txt": "text/plain"}
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def add_desk(app: FastAPI, models: Models, records: Records, feed: Feed) -> None:
    """Add the routes to ``app``. The edge checks who may ask."""

    @app.get("/debug/live", include_in_schema=False)  # endless: programs that try every described route would hang
    async def live() -> Response:
        """Server-sent events: who the workers are (``roster``), and once a second what they do (``state``)."""
        return EventStream(feed.follow, lambda error: sse(error.body(), "error"))

    @app.get("/debug/workers", tags=["operations"], response_model=None)
    async def workers() -> Response:
        """What this gateway knows of its workers, whom it only sends probes, and which way prompts went."""
        return _json(described(models))

    @app.get("/debug/requests", tags=["operations"], response_model=None)
    async def requests(request: Request) -> Response:
        """Requests that run, and the last that ended (``?limit=100``): when each step was, where, how it ended. Never a text."""
        limit = request.query_params.get("limit", "100")
        if not limit.isdecimal() or len(limit) > len(str(NUM_KEPT)) or not 1 <= int(limit) <= NUM_KEPT:
            raise InvalidRequestError(f"limit is {limit[:80]!r}; it must be 1 to {NUM_KEPT}", param="limit")
        return _json({"requests": records.newest(int(limit))})

    @app.get("/debug/requests/{request_id}", tags=["operations"], response_model=None, responses=_REFUSED)
    async def request(
        request_id: Annotated[str, Path(description="As in the header x-request-id.")],
    ) -> Response:
        """All requests that came with an id, as far as they are remembered."""
        found = records.find(request_id)
        if not found:
            raise NotFoundError(f"no request {request_id[:128]!r} is known; this gateway remembers the last {NUM_KEPT}")
        return _json({"requests": found})

    for file in resources.files("kvrelay.gateway.desk").joinpath("page").iterdir():
        path = CONSOLE if file.name == "index.html" else f"{CONSOLE}/{file.name}"
        _add_file(app, path, file.read_bytes(), _MEDIA_TYPES[file.name.rpartition(".")[2]])


def _add_file(app: FastAPI, path: str, content: bytes, media_type: str) -> None:
    @app.get(path, include_in_schema=False)
    async def file() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json", headers={"cache-control": "no-store"})
