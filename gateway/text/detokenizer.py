"""Token ids to text as they come: never half a character, and the pieces add up to the text of the whole.

A token's text can depend on the tokens before it (leading spaces, bytes of one character spread over tokens), so a piece is
what a short window of ids decodes to, less what was sent of it. A window that ends in an unfinished character waits for its rest,
but only as long as a character can be: bytes that never become one are sent as U+FFFD, and no window grows with the text.

The tokens of many models are bytes and nothing else. A token that is whole characters then adds its own text, whatever came before
it, and no window is decoded for it: twice per token that took a sixth of all that a gateway does with one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

_REPLACEMENT = "\ufffd"
_MAX_HELD_TOKENS = 4  # a character has at most four bytes, and a token at least one


class Detokenizer:
    """One sequence's output as text. ``decode`` turns ids into text; ``silent_ids`` have none, whatever it makes of them."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        silent_ids: Collection[int] = (),
        *,
        text_of: Callable[[int], str] | None = None,
    ) -> None:
        """``text_of``: what one token decodes to, where tokens are bytes that are decoded together; None: they are not."""
        self._decode = decode
        self._text_of = text_of
        self._silent_ids = frozenset(silent_ids)
        self._window: list[int] = []  # what the next piece's text depends on
        self._num_sent_chars = 0  # of the window's text
        self._num_held = 0  # tokens since the last piece that ended in a whole character

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that ``token_ids`` add, as far as it is certain."""
        return "".join([self._push_one(token_id) for token_id in token_ids if token_id not in self._silent_ids])

    def finish(self) -> str:
        """What is left at the end; a character that stayed unfinished is dropped."""
        text = self._decode(self._window).rstrip(_REPLACEMENT)[self._num_sent_chars :]
        self._window, self._num_sent_chars, self._num_held = [], 0, 0
        return text

    def _push_one(self, token_id: int) -> str:
        if self._text_of is not None and self._num_held == 0 and _REPLACEMENT not in (own := self._text_of(token_id)):
            if self._window:
                self._window, self._num_sent_chars = [], 0  # whole characters: nothing depends on them
            return own
        self._window.append(token_id)
        self._num_held += 1
        text = self._decode(self._window)
        is_unfinished = text.endswith(_REPLACEMENT)
        if is_unfinished:
            text = text[:-1]
        has_waited = self._num_held > _MAX_HELD_TOKENS
        if not has_waited and (is_unfinished or len(text) <= self._num_sent_chars):
            return ""
        piece = text[self._num_sent_chars :]
        # The tokens behind this piece are context for the next one; older ones no longer matter.
        del self._window[: -min(self._num_held, _MAX_HELD_TOKENS)]
        self._num_sent_chars = len(self._decode(self._window)) - is_unfinished
        if not is_unfinished:
            self._num_held = 0
        return piece
