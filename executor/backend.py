"""What an executor asks of the worker in its process."""

from __future__ import annotations

from typing import Protocol

from kvrelay.executor.progress import Progress
from kvrelay.executor.request import Request

Stats = dict[str, int]
"""Requests that run and wait, KV blocks that are used and free (cached ones among them), tokens of prompts and output so far."""


class Backend(Protocol):
    """Made on any thread; all methods are called on the executor's asyncio loop."""

    async def start(self) -> None:
        """Get ready for requests. Raises KvrelayError; ``stop`` comes after that, too."""

    async def run(self, request: Request, progress: Progress, *, stream: bool) -> None:
        """Write the request's outputs into ``progress``; it is complete when this returns. Raises ApiError.

        Cancelled, it gives everything back that the request holds.
        """

    async def stats(self) -> Stats:
        """How busy it is. Raises ApiError."""

    def not_live(self) -> list[str]:
        """Why nothing will ever come of any request; empty if something may."""

    async def stop(self) -> None:
        """End everything; no request runs any more."""
