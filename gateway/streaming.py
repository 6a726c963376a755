"""Generations to HTTP: one JSON body or server-sent events, and the end of both when the client leaves.

The status line waits for the first tokens, so that what fails before them is a proper HTTP error. What fails later is one error
event in the stream, never a silent cut.
"""

from __future__ import annotations

import logging

from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from kvrelay.gateway.api_request import ApiRequest
from kvrelay.gateway.errors import ApiError, ClientBehindError
from kvrelay.gateway.generation import Generator, TextDelta
from kvrelay.gateway.ignored import IgnoredFields
from kvrelay.gateway.jobs import Format, Job, total
from kvrelay.gateway.soon import Soon
from kvrelay.gateway.sse import EndAtDisconnect, EventStream

logger = logging.getLogger(__name__)


class Responder:
    """Runs jobs and answers them."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._ignored = IgnoredFields()

    async def respond(self, request: ApiRequest, job: Job) -> ASGIApp:
        """The response. What fails before its status line is raised, as ApiError or ClientLeftError, here or when it is sent."""
        answer = Soon(job.make_format)
        headers = self._ignored.headers(job.ignored)
        if job.is_stream:
            return EventStream(
                lambda stream: self._events(request, job, answer, stream),
                lambda error: answer.get().failed(error),
                headers,
            )
        usages = job.usages()
        deltas: list[list[TextDelta]] = [[] for _ in job.generations]
        async with EndAtDisconnect(request.receive):
            await self._generator.run_all(job.generations, usages, lambda index, delta: deltas[index].append(delta))
        body = answer.get().whole(job.choices(deltas), total(usages))
        return JSONResponse({**body, **job.extras()} if isinstance(body, dict) else body, headers=headers)

    async def _events(self, request: ApiRequest, job: Job, written: Soon[Format], stream: EventStream) -> bytes:
        """Write the job's events, up to the last ones, which are returned."""
        usages = job.usages()

        def take(index: int, delta: TextDelta) -> None:
            answer = written.get()
            before = b"" if stream.has_begun else answer.opening()
            stream.write(before + answer.chunk(index, delta))

        try:
            await self._generator.run_all(job.generations, usages, take)
            return written.get().closing(total(usages), job.extras())
        except Exception as error:
            if not stream.has_begun:
                raise
            request.cut = "client_behind" if isinstance(error, ClientBehindError) else "failed_mid_stream"
            if isinstance(error, ApiError):
                return written.get().failed(error)
            logger.exception("a stream failed", extra={"request_id": job.generations[0].request_id})
            return written.get().failed(ApiError("the server failed while it was answering; try again"))
