"""Messages to bytes and back, as msgpack with a bound on size. There is no pickle."""

from __future__ import annotations

import msgspec

from kvrelay.wire.errors import MalformedMessageError
from kvrelay.wire.messages import Message, Submit

MAX_CONTROL_FRAME_NBYTES = 16 * 2**20  # a Submit of a million tokens takes about 5 MB
MAX_IMAGES_NBYTES = 48 * 2**20  # files of one Submit's images together
MAX_FRAME_NBYTES_WITH_IMAGES = MAX_CONTROL_FRAME_NBYTES + MAX_IMAGES_NBYTES  # only workers that read images take it


class Codec:
    """Encodes and decodes control messages. Cheap to make; not thread-safe: one per thread."""

    def __init__(self, max_frame_nbytes: int = MAX_CONTROL_FRAME_NBYTES) -> None:
        """``max_frame_nbytes``: the largest frame to decode."""
        self._max_frame_nbytes = max_frame_nbytes
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Message)

    def encode(self, message: Message) -> bytes:
        """One frame. Raises MalformedMessageError if the message exceeds the bound, which is larger for images."""
        frame = self._encoder.encode(message)
        has_images = isinstance(message, Submit) and bool(message.images)
        bound = MAX_FRAME_NBYTES_WITH_IMAGES if has_images else MAX_CONTROL_FRAME_NBYTES
        if len(frame) > bound:
            raise MalformedMessageError(
                f"{type(message).__name__} of {len(frame)} bytes exceeds the bound of {bound} bytes per control message"
            )
        return frame

    def decode(self, frame: bytes | memoryview) -> Message:
        """The message in a frame. Raises MalformedMessageError on anything that is not one."""
        if len(frame) > self._max_frame_nbytes:
            raise MalformedMessageError(
                f"control frame of {len(frame)} bytes exceeds the bound of {self._max_frame_nbytes}"
            )
        try:
            message: Message = self._decoder.decode(frame)
            return message
        except (msgspec.DecodeError, ValueError, RecursionError) as error:  # the last one: nested too deep
            raise MalformedMessageError(f"not a kvrelay message: {error}") from error
