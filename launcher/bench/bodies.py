"""Makes the JSON bodies of planned requests: random token ids, or random words for text and chats.

The same seed makes the same prompts. Pieces that prompts share are kept encoded: a long shared prefix costs its making once.
A long prompt takes tens of milliseconds, and the loop that it is made on notes when chunks come: it is made in small steps.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvrelay.common.errors import SettingsError
from kvrelay.launcher.bench.workload import Piece, PlannedRequest

_NUM_KEPT = 4096  # encoded shared pieces; of 512 tokens each they take about 12 MB
_MIN_WORDS = 16
_STEP_TOKENS = 500  # made without a pause: about 0.15 ms

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class BodySpec:
    """What all bodies have in common."""

    model: str
    api: str  # completions, text or chat
    prompt_seed: int
    first_id: int = 1000  # of the random token ids
    last_id: int = 20000
    words: tuple[str, ...] = ()  # for text and chats
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int = 0  # of the run: with a temperature, requests carry seeds drawn from it


class BodyWriter:
    """Turns plans into bodies. Pure, but for what it keeps."""

    def __init__(self, spec: BodySpec) -> None:
        self._spec = spec
        self._is_text = spec.api != "completions"
        self._ids = range(spec.first_id, spec.last_id + 1)
        self._kept: OrderedDict[Piece, bytes] = OrderedDict()  # shared pieces, the one used last at the end
        fixed: dict[str, Any] = {
            "model": spec.model,
            "temperature": spec.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if spec.ignore_eos:  # strict servers refuse what they do not know
            fixed["ignore_eos"] = True
        self._fixed = msgspec.json.encode(fixed)[:-1]

    async def make(self, request: PlannedRequest) -> bytes:
        """The JSON body of ``request``. Everything else on the loop has its turn between two steps of the making."""
        steps = self._steps(request)
        while True:
            await asyncio.sleep(0)  # also if all of it is kept: to join it takes its time
            try:
                next(steps)
            except StopIteration as end:
                body: bytes = end.value
                return body

    def _steps(self, request: PlannedRequest) -> Generator[None, None, bytes]:
        parts: list[bytes] = []
        for piece in request.pieces:
            part = yield from (self._shared(piece) if piece.is_shared else self._encoded(piece))
            parts.append(part)
        if self._spec.api == "chat":
            prompt = b'"messages":[{"role":"user","content":"%s"}]' % b" ".join(parts)
        elif self._is_text:
            prompt = b'"prompt":"%s"' % b" ".join(parts)
        else:
            prompt = b'"prompt":[%s]' % b",".join(parts)
        seed = b"" if self._spec.temperature == 0 else b'"seed":%d,' % self._sampling_seed(request)
        return b'%s,"max_tokens":%d,%s%s}' % (self._fixed, request.output_tokens, seed, prompt)

    def _shared(self, piece: Piece) -> Generator[None, None, bytes]:
        found = self._kept.pop(piece, None)
        if found is None:
            found = yield from self._encoded(piece)
        self._kept[piece] = found
        if len(self._kept) > _NUM_KEPT:
            self._kept.popitem(last=False)
        return found

    def _encoded(self, piece: Piece) -> Generator[None, None, bytes]:
        chooser = random.Random(f"{self._spec.prompt_seed}/{piece.key}")  # noqa: S311 - the same prompts are wanted
        parts: list[bytes] = []
        for start in range(0, piece.length, _STEP_TOKENS):
            num = min(_STEP_TOKENS, piece.length - start)
            if self._is_text:
                parts.append(" ".join(chooser.choices(self._spec.words, k=num)).encode())
            else:
                parts.append(msgspec.json.encode(chooser.choices(self._ids, k=num))[1:-1])
            yield
        return (b" " if self._is_text else b",").join(parts)

    def _sampling_seed(self, request: PlannedRequest) -> int:
        """The request's own: with one for all, the same prompt would always have the same answer."""
        chooser = random.Random(f"{self._spec.seed}/sampling/{request.stream}/{request.number}")  # noqa: S311
        return chooser.getrandbits(31)


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
