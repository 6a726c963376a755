"""Messages to bytes and back, as msgpack with a bound on size. There is no pickle."""

from __future__ import annotations

import msgspec

from kvrelay.wire.errors import MalformedMessageError
from kvrelay.wire.messages import Message

MAX_CONTROL_FRAME_NBYTES = 16 * 2**20  # a Submit of a million tokens takes about 5 MB


class Codec:
    """Encodes and decodes control messages. Cheap to make; not thread-safe: one per thread."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Message)

    def encode(self, message: Message) -> bytes:
        """One frame. Raises MalformedMessageError if the message exceeds the bound."""
        frame = self._encoder.encode(message)
        if len(frame) > MAX_CONTROL_FRAME_NBYTES:
            raise MalformedMessageError(
                f"{type(message).__name__} of {len(frame)} bytes exceeds the bound of "
                f"{MAX_CONTROL_FRAME_NBYTES} bytes per control message"
            )
        return frame

    def decode(self, frame: bytes | memoryview) -> Message:
        """The message in a frame. Raises MalformedMessageError on anything that is not one."""
        if len(frame) > MAX_CONTROL_FRAME_NBYTES:
            raise MalformedMessageError(
                f"control frame of {len(frame)} bytes exceeds the bound of {MAX_CONTROL_FRAME_NBYTES}"
            )
        try:
            message: Message = self._decoder.decode(frame)
            return message
        except (msgspec.DecodeError, ValueError, RecursionError) as error:  # the last one: nested too deep
            raise MalformedMessageError(f"not a kvrelay message: {error}") from error
