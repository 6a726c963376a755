"""Grammars over a small vocabulary, and random answers that follow a guide."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import llguidance
import numpy as np

from kvrelay.common.sampling import Guide
from kvrelay.engine.guides.grammar import lark_of
from kvrelay.engine.guides.state import GrammarState
from kvrelay.gateway.chat.tools.formats.dsml import DSML

# Besides single bytes: tokens that cross the border between fixed and free text of a grammar.
_PIECES = (
    *('{"', '": "', '", "', '"}', "}}", '": {', ', "', '": ', " [", "]", "true", "null", "12", "\n\n", "  ", "é", "日本", "🙂"),
    *("the ", "word", ". ", "<tool", "_call>\n", "</", ">\n", "</parameter>", "[TOOL_CALLS]", "name", "arguments", "</think>"),
    *("<think>", "=", "(", ")]", "</arg_value>", f"</{DSML}parameter>"),
)  # fmt: skip
VOCABULARY = [bytes([value]) for value in range(256)] + [piece.encode() for piece in _PIECES] + [b""]
_END = len(VOCABULARY) - 1
# Random bytes would hardly ever end a string, so these tokens are preferred where they are allowed.
_LIKELY_PIECES = ('"', "}", "]", ")", "</", "</parameter>", "</arg_value>", f"</{DSML}parameter>", ">", "word")
_LIKELY = [VOCABULARY.index(piece.encode()) for piece in _LIKELY_PIECES]


class _Tokens:
    """A tokenizer with the interface that llguidance needs."""

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = tokens
        self.eos_token_id = _END
        self.bos_token_id = None
        self.special_token_ids = [number for number, token in enumerate(tokens) if token.startswith(b"\xff<")]

    def __call__(self, text: str | bytes) -> list[int]:
        raise AssertionError("guides force no tokens")


class Grammars:
    """Compiles guides and follows them, for a model with ``special`` tokens. In texts these appear by their names."""

    def __init__(self, special: Sequence[str] = ()) -> None:
        self.special_ids = {name: len(VOCABULARY) + index for index, name in enumerate(special)}
        # As on workers, special tokens begin with a byte that no text has.
        vocabulary = [*VOCABULARY, *(b"\xff" + name.encode() for name in special)]
        self._texts = [*VOCABULARY, *(name.encode() for name in special)]
        self._vocabulary = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Tokens(vocabulary)), eos_token=_END)

    def answer(self, guide: Guide, seed: int, start: str = "", max_tokens: int = 3000) -> str:
        """A random text that begins with ``start`` and that the guide allows. Raises AssertionError if it does not end."""
        rng = random.Random(seed)
        state = self._state(guide)
        self._accept(state, start)
        tokens: list[int] = []
        for _ in range(max_tokens):
            bits = self._allowed(state)
            allowed = np.flatnonzero(bits).tolist()
            assert allowed, f"nothing may follow {start + self._text(tokens)!r}"
            likely = [token for token in (*_LIKELY, *self.special_ids.values()) if bits[token]]
            token = rng.choice(likely if likely and rng.random() < 0.4 else allowed)
            if state.is_complete or token == _END or (bits[_END] and rng.random() < 0.2):
                return start + self._text(tokens)
            state.accept(token)
            tokens.append(token)
        raise AssertionError(f"no end after {max_tokens} tokens: {self._text(tokens)[-200:]!r}")

    def allows(self, guide: Guide, text: str) -> bool:
        """Whether ``text`` is a whole answer under the guide."""
        state = self._state(guide)
        try:
            self._accept(state, text)
        except ValueError:
            return False
        return bool(self._allowed(state)[_END])

    def _state(self, guide: Guide) -> GrammarState:
        return GrammarState(self._vocabulary, lark_of(guide, self.special_ids), (_END,))

    def _allowed(self, state: GrammarState) -> np.ndarray:
        mask = np.zeros(-(-len(self._texts) // 32), dtype=np.int32)
        state.fill(mask)
        return np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(self._texts)]

    def _accept(self, state: GrammarState, text: str) -> None:
        names = [re.escape(name) for name in self.special_ids]
        pieces = re.split(f"({'|'.join(names)})", text) if names else [text]
        for piece in pieces:
            for token in [self.special_ids[piece]] if piece in self.special_ids else piece.encode():
                state.accept(token)

    def _text(self, tokens: Sequence[int]) -> str:
        return b"".join(self._texts[token] for token in tokens).decode("utf-8", "replace")
