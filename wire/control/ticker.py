"""Periodic calls on the asyncio loop: lease reaping, transfer time-outs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)


async def every(interval_s: float, call: Callable[[], None], *, while_set: asyncio.Event | None = None) -> None:
    """Call ``call`` every ``interval_s`` until cancelled; what it raises is logged and does not end the series.

    With ``while_set``, sleeps while that is not set.
    """
    while True:
        if while_set is not None:
            await while_set.wait()
        await asyncio.sleep(interval_s)
        try:
            call()
        except Exception:
            logger.exception("a periodic call failed; it will be made again")
