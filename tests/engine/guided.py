"""Guided outputs from random logits, which are a harder test than a model's."""

from __future__ import annotations

import queue
from collections.abc import Sequence as Seq

import numpy as np

from kvrelay.common.sampling import Guide, GuideKind, SamplingParams
from kvrelay.engine.guides.guidance import GuideCompiler, GuideRefusal, GuideResult
from kvrelay.engine.step.sequence import GuideState


def sampling_of(kind: GuideKind, text: str = "", stop: tuple[int, ...] = (2,)) -> SamplingParams:
    return SamplingParams(max_tokens=1000, guide=Guide(kind=kind, text=text), stop_token_ids=stop)


def compiled(
    compiler: GuideCompiler, kind: GuideKind, text: str = "", stop: tuple[int, ...] = (2,), output: Seq[int] = ()
) -> GuideResult:
    """The compiler's result."""
    answers: queue.SimpleQueue[GuideResult] = queue.SimpleQueue()
    compiler.start(sampling_of(kind, text, stop), output, answers.put)
    return answers.get(timeout=120)


def refusal(compiler: GuideCompiler, kind: GuideKind, text: str) -> str:
    """The compiler's reason to refuse the guide."""
    result = compiled(compiler, kind, text)
    assert isinstance(result, GuideRefusal), f"{text} was taken"
    assert result.is_invalid
    return result.detail


def has_end(state: GuideState, vocabulary: list[bytes], text: str, end: int = 2) -> bool:
    """Whether the text, token by token of one byte, may end as a complete output."""
    try:
        for byte in text.encode():
            state.accept(vocabulary.index(bytes([byte])))
    except ValueError:
        return False
    mask = np.zeros(-(-len(vocabulary) // 32), dtype=np.int32)
    state.fill(mask)
    return bool(mask[end // 32] >> end % 32 & 1)


class RandomModel:
    """Random logits, with a growing bias to tokens that close strings, objects and lists, so that outputs end."""

    def __init__(self, vocabulary: list[bytes], seed: int) -> None:
        self._vocabulary = vocabulary
        self._random = np.random.default_rng(seed)
        self._ends = np.array([1.0 if token[:1] in {b'"', b"}", b"]"} else 0.0 for token in vocabulary])
        self._ends += [0.3 if len(token) == 1 else 0.0 for token in vocabulary]
        self._words = -(-len(vocabulary) // 32)

    def allowed(self, state: GuideState) -> np.ndarray:
        """The allowed token ids."""
        mask = np.full(self._words, 0x5A5A5A5A, dtype=np.int32)  # fill must overwrite all of it
        state.fill(mask)
        return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))

    def generate(
        self, state: GuideState, stop: tuple[int, ...] = (2,), max_tokens: int = 2000
    ) -> tuple[list[int], bool]:
        """An output without its stop token, and whether it is complete."""
        output: list[int] = []
        while len(output) < max_tokens:
            allowed = self.allowed(state)
            assert len(allowed), f"nothing may follow {self.text(output)!r}"
            can_stop = bool(set(stop) & set(allowed.tolist()))
            if can_stop and self._random.random() < 0.2 + len(output) / 100:
                return output, True
            scores = self._random.gumbel(size=len(allowed)) + self._ends[allowed] * (2 + len(output) * 0.3)
            scores[np.isin(allowed, stop)] = -np.inf if len(allowed) > len(stop) else 0.0
            token_id = int(allowed[scores.argmax()])
            if token_id in stop:
                return output, True
            state.accept(token_id)
            output.append(token_id)
            if state.is_complete:
                return output, True
        return output, False

    def text(self, output: Seq[int]) -> str:
        """The tokens' text. Raises UnicodeDecodeError at an incomplete character."""
        return b"".join(self._vocabulary[token_id] for token_id in output).decode()
