"""xgrammar over a small vocabulary, and random answers that follow a guide."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import numpy as np
import xgrammar

from kvrelay.common.sampling import Guide

# Bytes, and tokens that cross the borders between what a grammar fixes and what it leaves open.
_PIECES = (
    *('{"', '": "', '", "', '"}', "}}", '": {', ', "', '": ', " [", "]", "true", "null", "12", "\n\n", "  ", "é", "日本", "🙂"),
    *("the ", "word", ". ", "<tool", "_call>\n", "</", ">\n", "</parameter>", "[TOOL_CALLS]", "name", "arguments", "</think>"),
    *("<think>", "=", "(", ")]", "</arg_value>"),
)  # fmt: skip
VOCABULARY = [bytes([value]) for value in range(256)] + [piece.encode() for piece in _PIECES] + [b""]
_END = len(VOCABULARY) - 1
# An answer of random bytes would never end a string; these are likelier than others where they are allowed.
_LIKELY_PIECES = ('"', "}", "]", ")", "</", "</parameter>", "</arg_value>", ">", "word")
_LIKELY = [VOCABULARY.index(piece.encode()) for piece in _LIKELY_PIECES]


class Grammars:
    """Compiles guides and follows them, for a model that has ``special`` tokens; in texts, those stand by their names."""

    def __init__(self, special: Sequence[str] = ()) -> None:
        self.special_ids = {name: len(VOCABULARY) + index for index, name in enumerate(special)}
        # As the workers have it: special tokens begin with a byte that no text has.
        vocabulary = [*VOCABULARY, *(b"\xff" + name.encode() for name in special)]
        self._texts = [*VOCABULARY, *(name.encode() for name in special)]
        info = xgrammar.TokenizerInfo(vocabulary, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[_END])
        # With its cache, xgrammar 0.2 takes rules for the same that differ in a token's id only; workers compile without it, too.
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def answer(self, guide: Guide, seed: int, start: str = "", max_tokens: int = 3000) -> str:
        """A random text that the guide allows, from ``start`` on. Raises AssertionError if it does not end in time."""
        rng = random.Random(seed)
        matcher = xgrammar.GrammarMatcher(self._compiler.compile_structural_tag(guide.text))
        assert self._accept(matcher, start), f"the guide does not allow {start!r}"
        bitmask = xgrammar.allocate_token_bitmask(1, len(self._texts))
        tokens: list[int] = []
        for _ in range(max_tokens):
            matcher.fill_next_token_bitmask(bitmask)
            bits = np.unpackbits(bitmask[0].numpy().view(np.uint8), bitorder="little")[: len(self._texts)]
            allowed = np.flatnonzero(bits).tolist()
            likely = [token for token in _LIKELY if bits[token]]
            token = rng.choice(likely if likely and rng.random() < 0.4 else allowed)
            if bits[_END] and rng.random() < 0.2:
                token = _END
            assert matcher.accept_token(token)
            if token == _END or matcher.is_terminated():
                return start + self._text(tokens)
            tokens.append(token)
        raise AssertionError(f"no end after {max_tokens} tokens: {self._text(tokens)[-200:]!r}")

    def allows(self, guide: Guide, text: str) -> bool:
        """Whether ``text`` is a whole answer under the guide."""
        matcher = xgrammar.GrammarMatcher(
            self._compiler.compile_structural_tag(guide.text), terminate_without_stop_token=True
        )
        return self._accept(matcher, text) and bool(matcher.is_terminated())

    def _accept(self, matcher: xgrammar.GrammarMatcher, text: str) -> bool:
        names = [re.escape(name) for name in self.special_ids]
        pieces = re.split(f"({'|'.join(names)})", text) if names else [text]
        tokens = [
            token
            for piece in pieces
            for token in ([self.special_ids[piece]] if piece in self.special_ids else piece.encode())
        ]
        return all(matcher.accept_token(token) for token in tokens)

    def _text(self, tokens: Sequence[int]) -> str:
        return b"".join(self._texts[token] for token in tokens).decode("utf-8", "replace")
