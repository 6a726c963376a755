"""A loop that does not sleep between the parts of an answer: latency for the time of a core.

When a process has slept, the next message has to wake its CPU, which takes long on a virtual machine, and finds the core's caches
full of what ran meanwhile: most of what a gateway adds to a first token is that. A loop that asks the kernel again and again keeps
the core awake and its caches warm. Whoever else wants the core gets it: between two looks it is offered to them.
"""

from __future__ import annotations

import asyncio
import os


class BusyPoll:
    """Keeps the running event loop from sleeping for ``poll_s`` after each :meth:`touch`; 0: never. Of one loop."""

    def __init__(self, poll_s: float) -> None:
        self.is_polling = False
        self._poll_s = poll_s
        self._until_s = 0.0  # of the loop's clock

    def touch(self) -> None:
        """Something came, or was written: more may be near."""
        if not self._poll_s:
            return
        loop = asyncio.get_running_loop()
        self._until_s = loop.time() + self._poll_s
        if not self.is_polling:
            self.is_polling = True
            loop.call_soon(self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """A loop that has a callback to run asks for events without waiting for one."""
        if loop.time() < self._until_s:
            os.sched_yield()  # a process that waits for this core would not get it before the end of a time slice
            loop.call_soon(self._look, loop)
        else:
            self.is_polling = False
