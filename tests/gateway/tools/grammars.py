"""xgrammar over a small vocabulary, and random answers that follow a guide."""

from __future__ import annotations

import random

import numpy as np
import xgrammar

from kvrelay.common.sampling import Guide

# Bytes, and tokens that cross the borders between what a grammar fixes and what it leaves open.
_PIECES = (
    *('{"', '": "', '", "', '"}', "}}", '": {', ', "', '": ', " [", "]", "true", "null", "12", "\n\n", "  ", "é", "日本", "🙂"),
    *("the ", "word", ". ", "<tool", "_call>\n", "</", ">\n", "</parameter>", "[TOOL_CALLS]", "name", "arguments", "</think>"),
    *("<think>", "=", "(", ")]"),
)  # fmt: skip
VOCABULARY = [bytes([value]) for value in range(256)] + [piece.encode() for piece in _PIECES] + [b""]
_END = len(VOCABULARY) - 1
# An answer of random bytes would never end a string; these are likelier than others where they are allowed.
_LIKELY = [VOCABULARY.index(piece.encode()) for piece in ('"', "}", "]", ")", "</", "</parameter>", ">", "word")]


class Grammars:
    """Compiles guides and follows them."""

    def __init__(self) -> None:
        info = xgrammar.TokenizerInfo(VOCABULARY, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[_END])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)

    def answer(self, guide: Guide, seed: int, start: str = "", max_tokens: int = 3000) -> str:
        """A random text that the guide allows, from ``start`` on. Raises AssertionError if it does not end in time."""
        rng = random.Random(seed)
        matcher = xgrammar.GrammarMatcher(self._compiler.compile_structural_tag(guide.text))
        assert matcher.accept_string(start), f"the guide does not allow {start!r}"
        bitmask = xgrammar.allocate_token_bitmask(1, len(VOCABULARY))
        tokens: list[int] = []
        for _ in range(max_tokens):
            matcher.fill_next_token_bitmask(bitmask)
            bits = np.unpackbits(bitmask[0].numpy().view(np.uint8), bitorder="little")[: len(VOCABULARY)]
            allowed = np.flatnonzero(bits).tolist()
            likely = [token for token in _LIKELY if bits[token]]
            token = rng.choice(likely if likely and rng.random() < 0.4 else allowed)
            if bits[_END] and rng.random() < 0.2:
                token = _END
            assert matcher.accept_token(token)
            if token == _END or matcher.is_terminated():
                return start + b"".join(VOCABULARY[token] for token in tokens).decode("utf-8", "replace")
            tokens.append(token)
        raise AssertionError(
            f"no end after {max_tokens} tokens: {b''.join(VOCABULARY[token] for token in tokens)[-200:]!r}"
        )

    def allows(self, guide: Guide, text: str) -> bool:
        """Whether ``text`` is a whole answer under the guide."""
        matcher = xgrammar.GrammarMatcher(
            self._compiler.compile_structural_tag(guide.text), terminate_without_stop_token=True
        )
        return bool(matcher.accept_string(text)) and bool(matcher.is_terminated())
