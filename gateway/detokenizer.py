"""Token ids to text as they come: never half a character, and the pieces add up to the text of the whole.

A token's text can depend on the tokens before it (leading spaces, bytes of one character spread over tokens), so a piece is the
difference of two decodes: of a short window behind the last safe place, with and without the new tokens. A window that ends
in an unfinished character waits for its rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"


class Decoder(Protocol):
    """What turns ids into text (kvrelay.gateway.tokenizer.Tokenizer)."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids``."""


class Detokenizer:
    """One sequence's output as text."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._ids: list[int] = []
        self._window = 0  # decoding starts here; everything before it is settled
        self._emitted = 0  # ids up to here are emitted

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that ``token_ids`` add, as far as it is certain."""
        self._ids.extend(token_ids)
        before = self._decoder.decode(self._ids[self._window : self._emitted])
        now = self._decoder.decode(self._ids[self._window :])
        if now.endswith(_REPLACEMENT) or len(now) <= len(before):
            return ""
        self._window, self._emitted = self._emitted, len(self._ids)
        return now[len(before) :]

    def finish(self) -> str:
        """What is left at the end; a character that stayed unfinished is dropped."""
        before = self._decoder.decode(self._ids[self._window : self._emitted])
        now = self._decoder.decode(self._ids[self._window :]).rstrip(_REPLACEMENT)
        self._window = self._emitted = len(self._ids)
        return now[len(before) :]
