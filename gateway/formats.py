"""The bodies of OpenAI's answers: chat completions and text completions, whole and in chunks."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from kvrelay.common.sampling import SampledToken
from kvrelay.gateway.generation import TextDelta
from kvrelay.gateway.tokenizer import Tokenizer

_IMPOSSIBLE = -9999.0


class ChatFormat:
    """Answers of ``/v1/chat/completions``. Implements :class:`kvrelay.gateway.streaming.Format`."""

    def __init__(self, request_id: str, model: str, tokenizer: Tokenizer, *, logprobs: bool, token_ids: bool) -> None:
        self._head = {"id": f"chatcmpl-{request_id}", "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._token_ids = token_ids

    def opening(self) -> list[dict[str, Any]]:
        """The chunk that says who speaks."""
        return [self._chunk([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])]

    def chunk(self, index: int, delta: TextDelta) -> dict[str, Any]:
        """One chunk of a stream."""
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"content": delta.text} if delta.text else {},
            "finish_reason": delta.finish_reason,
        }
        if self._logprobs:
            choice["logprobs"] = self._logprobs_body(delta.tokens)
        if self._token_ids:
            choice["token_ids"] = [token.token_id for token in delta.tokens]
        return self._chunk([choice])

    def usage_chunk(self, usage: dict[str, object]) -> dict[str, Any]:
        """The last chunk, with usage and no choice."""
        return {**self._chunk([]), "usage": usage}

    def whole(self, choices: Sequence[Sequence[TextDelta]], usage: dict[str, object]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        bodies: list[dict[str, Any]] = []
        for index, deltas in enumerate(choices):
            tokens = [token for delta in deltas for token in delta.tokens]
            body: dict[str, Any] = {
                "index": index,
                "message": {"role": "assistant", "content": "".join(delta.text for delta in deltas)},
                "finish_reason": deltas[-1].finish_reason,
                "logprobs": self._logprobs_body(tokens) if self._logprobs else None,
            }
            if self._token_ids:
                body["token_ids"] = [token.token_id for token in tokens]
            bodies.append(body)
        return {**self._head, "object": "chat.completion", "choices": bodies, "usage": usage}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": choices}

    def _logprobs_body(self, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
            text = self._tokenizer.token_text(token_id)
            return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}

        return {
            "content": [
                {
                    **entry(token.token_id, token.logprob),
                    "top_logprobs": [entry(token_id, logprob) for token_id, logprob in token.top_logprobs],
                }
                for token in tokens
            ]
        }


class CompletionFormat:
    """Answers of ``/v1/completions``. Implements :class:`kvrelay.gateway.streaming.Format`."""

    def __init__(self, request_id: str, model: str, tokenizer: Tokenizer, *, logprobs: bool, token_ids: bool) -> None:
        self._head = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._token_ids = token_ids
        self._offsets: dict[int, int] = {}  # by choice: characters sent so far

    def opening(self) -> list[dict[str, Any]]:
        """Nothing comes before the text."""
        return []

    def chunk(self, index: int, delta: TextDelta) -> dict[str, Any]:
        """One chunk of a stream."""
        return {**self._head, "choices": [self._choice(index, [delta])]}

    def usage_chunk(self, usage: dict[str, object]) -> dict[str, Any]:
        """The last chunk, with usage and no choice."""
        return {**self._head, "choices": [], "usage": usage}

    def whole(self, choices: Sequence[Sequence[TextDelta]], usage: dict[str, object]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        bodies = [self._choice(index, deltas) for index, deltas in enumerate(choices)]
        return {**self._head, "choices": bodies, "usage": usage}

    def _choice(self, index: int, deltas: Sequence[TextDelta]) -> dict[str, Any]:
        tokens = [token for delta in deltas for token in delta.tokens]
        choice: dict[str, Any] = {
            "index": index,
            "text": "".join(delta.text for delta in deltas),
            "finish_reason": deltas[-1].finish_reason,
            "logprobs": self._logprobs_body(index, tokens) if self._logprobs else None,
        }
        if self._token_ids:
            choice["token_ids"] = [token.token_id for token in tokens]
        return choice

    def _logprobs_body(self, index: int, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        texts = [self._tokenizer.token_text(token.token_id) for token in tokens]
        offset = self._offsets.get(index, 0)
        offsets: list[int] = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        self._offsets[index] = offset
        return {
            "tokens": texts,
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [
                {self._tokenizer.token_text(token_id): _finite(logprob) for token_id, logprob in token.top_logprobs}
                for token in tokens
            ],
            "text_offset": offsets,
        }


def _finite(logprob: float | None) -> float | None:
    """JSON has no infinity, and clients expect a number: OpenAI and vLLM write -9999.0 for a token that cannot be."""
    return logprob if logprob is None or math.isfinite(logprob) else _IMPOSSIBLE
