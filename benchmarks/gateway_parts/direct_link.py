"""A control link to a worker, in the place of a gateway."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict

from prometheus_client import CollectorRegistry

from kvrelay.wire.control.client import ControlClient
from kvrelay.wire.messages import Cancelled, Failed, Hello, HelloRefused, Message, Role, TokenDelta, Tokens, Welcome
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.network import Network
from kvrelay.wire.settings import LinkSettings

_ANSWER_S = 60.0

Heard = tuple[float, TokenDelta | Failed | Cancelled]  # arrival by the monotonic clock, and the message


class DirectLink:
    """The link to one worker. The caller starts and stops ``client``. Implements ClientHandler."""

    def __init__(self, address: str, network: Network, settings: LinkSettings) -> None:
        self.is_up = asyncio.Event()
        self._heard: dict[str, asyncio.Queue[Heard]] = defaultdict(asyncio.Queue)  # by request
        hello = Hello(role=Role.GATEWAY, peer_id="benchmark")
        metrics = WireMetrics(CollectorRegistry())
        self.client = ControlClient(address, hello, self, settings, metrics=metrics, network=network)

    def on_welcome(self, welcome: Welcome) -> None:
        """Note that the link is up."""
        self.is_up.set()

    def on_message(self, message: Message) -> None:
        """Note when a message came."""
        now_s = time.monotonic()
        if isinstance(message, Tokens):
            for item in message.items:
                self._heard[item.request_id].put_nowait((now_s, item))
        elif isinstance(message, Failed | Cancelled):
            self._heard[message.request_id].put_nowait((now_s, message))

    def on_lost(self, reason: str) -> None:
        """Do nothing; waiting callers time out."""

    def on_refused(self, refused: HelloRefused) -> None:
        """Do nothing; waiting callers time out."""

    async def next(self, request_id: str) -> tuple[float, TokenDelta]:
        """The next tokens and their arrival time. Raises RuntimeError if the request failed, TimeoutError after a minute."""
        async with asyncio.timeout(_ANSWER_S):
            at_s, told = await self._heard[request_id].get()
        if not isinstance(told, TokenDelta):
            raise RuntimeError(f"no token came: {told}")
        return at_s, told
