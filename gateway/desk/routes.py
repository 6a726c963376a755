"""What operators ask a gateway for: ``/debug/live``, ``/debug/requests``, and one of them by its id."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import FastAPI, Path
from starlette.requests import Request
from starlette.responses import Response

from kvrelay.gateway.apis.answer_docs import ErrorBody, errors_as
from kvrelay.gateway.desk.feed import Feed
from kvrelay.gateway.desk.records import NUM_KEPT, Records
from kvrelay.gateway.errors import InvalidRequestError, NotFoundError
from kvrelay.gateway.http.sse import EventStream, sse

_REFUSED = errors_as(ErrorBody, {"4XX": "With the reason"})


def add_desk(app: FastAPI, records: Records, feed: Feed) -> None:
    """Serve all of it. Who may ask is the edge's matter."""

    @app.get("/debug/live", include_in_schema=False)  # what tries all that is described would wait for its end
    async def live() -> Response:
        """Server-sent events: who the workers are (``roster``), and once a second what they do (``state``)."""
        return EventStream(feed.follow, lambda error: sse(error.body(), "error"))

    @app.get("/debug/requests", tags=["operations"], response_model=None)
    async def requests(request: Request) -> Response:
        """Requests that run, and the last that ended (``?limit=100``): when each step was, where, how it ended. Never a text."""
        limit = request.query_params.get("limit", "100")
        if not limit.isdecimal() or not 1 <= int(limit) <= NUM_KEPT:
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


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json", headers={"cache-control": "no-store"})
