"""Makes the JSON bodies of planned requests: random token ids, or random words for chats.

The same seed makes the same prompts. Pieces that prompts share are kept encoded: a long shared prefix costs its making once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from kvrelay.common.errors import SettingsError
from kvrelay.launcher.bench.workload import Piece, PlannedRequest

_NUM_KEPT = 4096  # encoded shared pieces; of 512 tokens each they take about 12 MB
_MIN_WORDS = 16

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class BodySpec:
    """What all bodies have in common."""

    model: str
    api: str  # completions or chat
    prompt_seed: int
    first_id: int = 1000  # of the random token ids
    last_id: int = 20000
    words: tuple[str, ...] = ()  # for chats
    ignore_eos: bool = True
    temperature: float = 0.0


class BodyWriter:
    """Turns plans into bodies. Pure, but for what it keeps."""

    def __init__(self, spec: BodySpec) -> None:
        self._spec = spec
        self._ids = range(spec.first_id, spec.last_id + 1)
        self._shared = lru_cache(_NUM_KEPT)(self._encoded)
        fixed: dict[str, Any] = {
            "model": spec.model,
            "temperature": spec.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if spec.ignore_eos:  # strict servers refuse what they do not know
            fixed["ignore_eos"] = True
        self._fixed = msgspec.json.encode(fixed)[:-1]

    def body(self, request: PlannedRequest) -> bytes:
        """The JSON body of ``request``."""
        parts = [self._shared(piece) if piece.is_shared else self._encoded(piece) for piece in request.pieces]
        if self._spec.api == "chat":
            prompt = b'"messages":[{"role":"user","content":"%s"}]' % b" ".join(parts)
        else:
            prompt = b'"prompt":[%s]' % b",".join(parts)
        return b'%s,"max_tokens":%d,%s}' % (self._fixed, request.output_tokens, prompt)

    def token_ids(self, piece: Piece) -> list[int]:
        """The tokens of ``piece``."""
        return self._chooser(piece).choices(self._ids, k=piece.length)

    def _encoded(self, piece: Piece) -> bytes:
        if self._spec.api == "chat":
            return " ".join(self._chooser(piece).choices(self._spec.words, k=piece.length)).encode()
        return msgspec.json.encode(self.token_ids(piece))[1:-1]

    def _chooser(self, piece: Piece) -> random.Random:
        return random.Random(f"{self._spec.prompt_seed}/{piece.key}")  # noqa: S311 - the same prompts are wanted


def single_token_words(encode: Encode) -> tuple[str, ...]:
    """Those of our words of which any number, joined by spaces, is that many tokens. Raises SettingsError if there are too few.

    ``encode`` must add no special tokens.
    """
    words = tuple(word for word in WORDS if len(encode(word)) == 1 and len(encode(f"{word} {word} {word}")) == 3)
    if len(words) < _MIN_WORDS or len(encode(" ".join(words))) != len(words):
        raise SettingsError(
            f"--tokenizer: only {len(words)} of {len(WORDS)} common English words are one token each for this tokenizer; "
            "leave --tokenizer out (a word is then taken for a token) or use --api completions"
        )
    return words


WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state"),
    *("family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system"),
    *(
        "program",
        "question",
        "work",
        "government",
        "number",
        "night",
        "point",
        "home",
        "water",
        "room",
        "mother",
        "area",
    ),
    *("money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue"),
    *("side", "kind", "head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end", "member"),
    *("law", "car", "city", "community", "name", "president", "team", "minute", "idea", "kid", "body", "information"),
    *(
        "back",
        "parent",
        "face",
        "others",
        "level",
        "office",
        "door",
        "health",
        "person",
        "art",
        "war",
        "history",
        "party",
    ),
    *(
        "result",
        "change",
        "morning",
        "reason",
        "research",
        "girl",
        "guy",
        "moment",
        "air",
        "teacher",
        "force",
        "education",
    ),
)
