"""Server-sent events out of bytes as they come: no copy and no search beyond the first line end in the common case.

Not for other line ends than LF and CRLF, which is all that HTTP servers of models send.
"""

from __future__ import annotations

from collections.abc import Iterator

MAX_EVENT_BYTES = 64 * 2**20


class EventTooLongError(ValueError):
    """An event goes on and on: what comes is no event stream."""


class EventSplitter:
    """Feed it what arrives; it gives the ``data`` of each event that is complete."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The data of every event that ends in ``data``. Raises EventTooLongError."""
        if not self._rest and data.startswith(b"data: ") and data.find(b"\n\n") == len(data) - 2:
            lines = data[6:-2]
            if b"\n" not in lines:  # one event, one line, nothing else: nearly all that ever comes
                yield lines
                return
        data = self._rest + data
        if b"\r" in data:
            # A CR at the very end may be the first half of a line end.
            end = len(data) - data.endswith(b"\r")
            data = data[:end].replace(b"\r\n", b"\n") + data[end:]
        *events, self._rest = data.split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLongError(f"an event has more than {MAX_EVENT_BYTES} bytes")
        for event in events:
            found = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if found:  # comments, such as pings, have none
                yield b"\n".join(found)
