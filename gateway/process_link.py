"""What a gateway's parent process and its children say to each other: msgspec structs over a socket pair, one link a child.

The parent speaks first, with an :class:`Assignment`. A child that serves says so, tells its metrics when it is asked, and asks for
those of all processes when somebody asks *it*. The end of the link is the end of the other side: the parent's for good, a child's
until the next one.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from kvrelay.gateway.metric_totals import Family
from kvrelay.gateway.settings import GatewaySettings

_LENGTH_BYTES = 4


class Assignment(msgspec.Struct, tag="assignment", frozen=True):
    """Parent to child: what to serve, and which of how many it is."""

    settings: GatewaySettings
    index: int
    num_processes: int


class TellMetrics(msgspec.Struct, tag="tell_metrics", frozen=True):
    """Parent to child."""


class Totals(msgspec.Struct, tag="totals", frozen=True):
    """Parent to child: the metrics of all processes, for the question ``number``."""

    number: int
    families: list[Family]


class Serving(msgspec.Struct, tag="serving", frozen=True):
    """Child to parent: it accepts connections."""


class CannotServe(msgspec.Struct, tag="cannot_serve", frozen=True):
    """Child to parent, which tells the operator: why it ends."""

    detail: str
    is_setting: bool  # a setting is wrong


class Metrics(msgspec.Struct, tag="metrics", frozen=True):
    """Child to parent: its own."""

    families: list[Family]


class AskTotals(msgspec.Struct, tag="ask_totals", frozen=True):
    """Child to parent."""

    number: int


ToChild = Assignment | TellMetrics | Totals
ToParent = Serving | CannotServe | Metrics | AskTotals
Sent = TypeVar("Sent", ToChild, ToParent)
Received = TypeVar("Received", ToChild, ToParent)


def parents_link(connection: socket.socket) -> ProcessLink[ToChild, ToParent]:
    """The parent's side."""
    decoder: msgspec.msgpack.Decoder[ToParent] = msgspec.msgpack.Decoder(ToParent)
    return ProcessLink(connection, decoder)


def childs_link(connection: socket.socket) -> ProcessLink[ToParent, ToChild]:
    """The child's side."""
    decoder: msgspec.msgpack.Decoder[ToChild] = msgspec.msgpack.Decoder(ToChild)
    return ProcessLink(connection, decoder)


class ProcessLink(Generic[Sent, Received]):
    """One side of a link. ``open`` once on the running loop, ``close`` once. Both sides are one program: nobody lies."""

    def __init__(self, connection: socket.socket, decoder: msgspec.msgpack.Decoder[Received]) -> None:
        """Owns ``connection``; ``decoder`` knows what the other side says."""
        self._connection = connection
        self._encoder = msgspec.msgpack.Encoder()
        self._decode: Callable[[bytes], Received] = decoder.decode
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    def send_now(self, message: Sent) -> None:
        """Before ``open``: blocks until it is sent. Raises OSError if nobody is there."""
        self._connection.sendall(self._framed(message))

    def receive_now(self) -> Received | None:
        """Before ``open``: blocks until a message has come; None if the other side has ended."""
        head = self._connection.recv(_LENGTH_BYTES, socket.MSG_WAITALL)
        body = self._connection.recv(int.from_bytes(head), socket.MSG_WAITALL)
        return self._decode(body) if body else None

    async def open(self) -> None:
        """Go on with the running loop."""
        self._connection.setblocking(False)
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._connection)

    def send(self, message: Sent) -> None:
        """Queue a message; nothing happens if the other side has ended."""
        assert self._writer is not None, "open() comes first"
        if not self._writer.is_closing():
            self._writer.write(self._framed(message))

    async def receive(self) -> Received | None:
        """The next message; None when the other side has ended."""
        assert self._reader is not None, "open() comes first"
        try:
            length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES))
            return self._decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def close(self) -> None:
        """The end."""
        if self._writer is not None:
            self._writer.close()
        else:
            self._connection.close()

    def _framed(self, message: Sent) -> bytes:
        body = self._encoder.encode(message)
        return len(body).to_bytes(_LENGTH_BYTES) + body
