"""The other processes of a gateway, as one of them sees them: who takes the next connection, what their metrics add up to.

Made by :mod:`kvrelay.gateway.process`, used on that process's asyncio loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging

from prometheus_client import CollectorRegistry

from kvrelay.gateway.errors import UnavailableError
from kvrelay.gateway.key_limits import KeyCounts
from kvrelay.gateway.metric_totals import exposition, snapshot
from kvrelay.gateway.process_link import (
    AskTotals,
    Metrics,
    ProcessLink,
    Serving,
    TellMetrics,
    ToChild,
    ToParent,
    Totals,
)
from kvrelay.gateway.shared_memory import SharedMemory

logger = logging.getLogger(__name__)

_TOTALS_S = 5.0  # more than the parent waits for a process that does not answer it


class Siblings:
    """Implements :class:`kvrelay.gateway.http_server.Door`."""

    def __init__(
        self, link: ProcessLink[ToParent, ToChild], memory: SharedMemory, index: int, registry: CollectorRegistry
    ) -> None:
        """``index``: which of the processes this is; ``registry``: its metrics."""
        self._link = link
        self._memory = memory
        self._index = index
        self._registry = registry
        self._questions: dict[int, asyncio.Future[Totals]] = {}
        self._numbers = itertools.count()

    async def open(self) -> None:
        """Go on with the link on the running loop."""
        await self._link.open()

    async def listen(self) -> None:
        """Answer the parent; returns when it has ended."""
        while (message := await self._link.receive()) is not None:
            match message:
                case TellMetrics():
                    self._link.send(Metrics(snapshot(self._registry)))
                case Totals(number=number):
                    if (question := self._questions.get(number)) is not None and not question.done():
                        question.set_result(message)
                case _:
                    logger.error("unexpected %s from the parent process", type(message).__name__)

    def close(self) -> None:
        """The end of the link."""
        self._link.close()

    async def exposition(self) -> bytes:
        """The metrics of all processes together, for Prometheus. Raises UnavailableError if the parent does not tell them."""
        number = next(self._numbers)
        question = self._questions[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(_TOTALS_S):
                self._link.send(AskTotals(number))
                totals = await question
        except TimeoutError as error:
            # This process's own would look as if all had been restarted.
            raise UnavailableError("the gateway's processes do not tell their metrics", retry_after_s=1) from error
        finally:
            del self._questions[number]
        return exposition(totals.families)

    def key_counts(self, name: str) -> KeyCounts:
        """What of an API key's limits is used, in all processes."""
        return self._memory.key_counts(name, self._index)

    def on_open(self) -> None:
        """This process accepts connections from now on."""
        self.on_connections(0)
        self._link.send(Serving())

    def on_connections(self, number: int) -> None:
        """It has so many now."""
        self._memory.set_connections(self._index, number)

    def on_closed(self) -> None:
        """It accepts none any more."""
        self._memory.set_connections(self._index, None)

    def others_have_fewer(self, number: int) -> bool:
        """Whether another process that accepts connections has fewer than ``number``."""
        fewest = self._memory.fewest_connections()
        return fewest is not None and fewest < number
