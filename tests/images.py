"""Images for tests of the code around them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from kvrelay.common.images import ImageSpan, PromptImage, image_digest
from kvrelay.engine.fake.images import FakeImageReader

PLACEHOLDER, BREAK = 3, 4  # token ids


def png(width: int = 64, height: int = 64, shade: int = 0) -> bytes:
    """A grey PNG file."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = (b"\0" + bytes([shade]) * width) * height
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def with_images(*parts: list[int] | bytes) -> tuple[list[int], list[PromptImage]]:
    """A prompt of token ids and PNG files of one size, 128 x 128, whose places have 2 rows of 2 placeholders each."""
    token_ids: list[int] = []
    images: list[PromptImage] = []
    for part in parts:
        if isinstance(part, bytes):
            start = len(token_ids)
            token_ids += [PLACEHOLDER, PLACEHOLDER, BREAK, PLACEHOLDER, PLACEHOLDER]
            images.append(PromptImage(ImageSpan(start, len(token_ids), image_digest(part)), part))
        else:
            token_ids += part
    return token_ids, images


class PlayedThreads(Executor):
    """Threads that run when the test says so."""

    def __init__(self, *, is_at_once: bool = False) -> None:
        self._is_at_once = is_at_once
        self._calls: list[Callable[[], None]] = []

    def submit(self, call: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        """See Executor."""
        self._calls.append(lambda: call(*args, **named))
        if self._is_at_once:
            self.run()
        return Future()

    def run(self, most: int = 1000) -> int:
        """Run what waits, also what comes meanwhile. Returns how many calls that were."""
        for count in range(most):
            if not self._calls:
                return count
            self._calls.pop(0)()
        return most


def reader(*, takes_whole: bool = False) -> FakeImageReader:
    """Reads the images of ``with_images``."""
    return FakeImageReader(PLACEHOLDER, takes_whole=takes_whole)
