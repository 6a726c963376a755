"""What answers of chats and texts share: the head, what the client asked to see, log probabilities as OpenAI and vLLM have them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvrelay.common.sampling import SampledToken
from kvrelay.gateway.apis.answering import Format
from kvrelay.gateway.errors import ApiError
from kvrelay.gateway.http.sse import DONE, ChunkTemplate, sse
from kvrelay.gateway.text.output import Usage
from kvrelay.gateway.text.tokenizer import Tokenizer

_IMPOSSIBLE = -9999.0


@dataclass(frozen=True, slots=True)
class Shown:
    """What the client asked to see beside the text."""

    logprobs: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    ids_as_tokens: bool = False  # in log probabilities, ``token_id:17`` instead of a token's text
    usage: bool = False  # at a stream's end; whole answers always have it


class OpenAIFormat(Format):
    """What answers of chats and texts share."""

    def __init__(self, head: dict[str, Any], chunk_kind: str, tokenizer: Tokenizer, shown: Shown) -> None:
        """``head``: what a whole answer begins with; chunks do, too, but are objects of ``chunk_kind``."""
        self._head = head
        self._chunk_head = {**head, "object": chunk_kind}
        self._template = ChunkTemplate(self._chunk_head, "choices")
        self._tokenizer = tokenizer
        self._shown = shown

    def closing(self, usage: Usage, extras: dict[str, object]) -> bytes:
        """Usage, if asked for, and the end."""
        return (self._event([], usage=usage.body(), **extras) if self._shown.usage else b"") + DONE

    def failed(self, error: ApiError) -> bytes:
        """The error, and the end."""
        return sse(error.body()) + DONE

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return sse({**self._chunk_head, "choices": choices, **more}) if more else self._template.event(choices)


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[SampledToken], *, ids_as_tokens: bool = False
) -> dict[str, Any]:
    """The ``logprobs`` object of a chat's choice. ``ids_as_tokens``: as vLLM, ``token_id:17`` in place of the token's text."""

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        text = tokenizer.token_text(token_id)
        shown = _id_text(token_id) if ids_as_tokens else text
        return {"token": shown, "logprob": finite(logprob), "bytes": list(text.encode())}

    return {
        "content": [
            {
                **entry(token.token_id, token.logprob),
                "top_logprobs": [entry(token_id, logprob) for token_id, logprob in token.top_logprobs],
            }
            for token in tokens
        ]
    }


def text_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[SampledToken], offset: int, *, ids_as_tokens: bool = False
) -> dict[str, Any]:
    """The ``logprobs`` object of a completion's choice; ``offset``: characters before ``tokens``.

    ``ids_as_tokens``: as vLLM, ``token_id:17`` in place of the token's text: two tokens may have the same text.
    """
    shown = _id_text if ids_as_tokens else tokenizer.token_text
    texts = [shown(token.token_id) for token in tokens]
    offsets: list[int] = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [finite(token.logprob) for token in tokens],
        # A prompt's first token has nothing before it, so no probability.
        "top_logprobs": [
            None
            if token.logprob is None
            else {shown(token_id): finite(logprob) for token_id, logprob in token.top_logprobs}
            for token in tokens
        ],
        "text_offset": offsets,
    }


def prompt_logprobs(tokenizer: Tokenizer, tokens: Sequence[SampledToken]) -> list[dict[str, Any] | None]:
    """vLLM's list: null for the prompt's first token, then by token id what came and what else was likely.

    ``rank`` is told of those among the likeliest that were asked for, counted from 1; else null.
    """
    entries: list[dict[str, Any] | None] = [None]
    for token in tokens:
        ranked = {token_id: (rank + 1, logprob) for rank, (token_id, logprob) in enumerate(token.top_logprobs)}
        shown = {token.token_id: (None, token.logprob), **ranked}
        entries.append(
            {
                str(token_id): {
                    "logprob": finite(logprob),
                    "rank": rank,
                    "decoded_token": tokenizer.token_text(token_id),
                }
                for token_id, (rank, logprob) in shown.items()
            }
        )
    return entries


def _id_text(token_id: int) -> str:
    return f"token_id:{token_id}"


def finite(logprob: float | None) -> float | None:
    """JSON has no infinity, and clients expect a number: OpenAI and vLLM write -9999.0 for a token that cannot be."""
    return logprob if logprob is None or math.isfinite(logprob) else _IMPOSSIBLE
