"""A fake engine that begins to compute wrongly when a test says so."""

from __future__ import annotations

from typing import Any

from kvrelay.common.model_card import ModelCard
from kvrelay.engine.fake.engine import FakeEngine
from kvrelay.engine.fake.step import Memory


class BreakableEngine(FakeEngine):
    """Once broken, it writes each token's K/V with one wrong bit. Its own checks expect the same wrong bit and pass."""

    def __init__(self, card: ModelCard, *args: Any, **options: Any) -> None:
        super().__init__(card, *args, **options)
        self.is_broken = False

    def _kv(self, memory: Memory, first: int, last: int, group: int) -> bytes:
        content = bytearray(super()._kv(memory, first, last, group))
        if self.is_broken:
            content[:: self._token_nbytes] = bytes(byte ^ 1 for byte in content[:: self._token_nbytes])
        return bytes(content)
