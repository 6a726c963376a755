"""The choices of one prompt (``n``, ``best_of``) compute it once: the first one goes ahead, the others follow its K/V.

The first choice takes its way as any request. As soon as its K/V lie verified on a decode worker, the others are sent there: they
find all full blocks of the prompt in that worker's prefix cache, share them, and compute what is left, less than a block. From
there on each writes into blocks of its own. Every choice is a request with attempts of its own; where the first one's worker has
no room for them, or is lost, they are routed as anybody.
"""

from __future__ import annotations

import asyncio


class PromptShare:
    """What the choices of one prompt know of each other. Lives on the gateway's asyncio loop."""

    def __init__(self) -> None:
        self._is_settled = asyncio.Event()
        self.decode_address: str | None = None  # where the prompt's K/V lie, as far as known

    def settle(self, decode_address: str | None) -> None:
        """The first choice's K/V lie on that worker; or, with None, it is over. The first word counts."""
        if not self._is_settled.is_set():
            self.decode_address = decode_address
            self._is_settled.set()

    async def settled(self) -> None:
        """Returns when it is known where the K/V lie, or that nobody will know."""
        await self._is_settled.wait()
