"""Answers of ``/v1/completions``, whole or in chunks, into a request's progress. Asked with ``return_token_ids``, and log
probabilities with ``return_tokens_as_token_ids``: by text, two tokens could not be told apart.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from kvrelay.executor.outputs import Logprob, Piece, TokenLogprobs
from kvrelay.executor.progress import Progress

_ID_PREFIX = "token_id:"


class CompletionReader:
    """Of one request."""

    def __init__(self, progress: Progress, *, tells_logprobs: bool) -> None:
        self._progress = progress
        self._tells_logprobs = tells_logprobs

    def read(self, body: Mapping[str, Any]) -> None:
        """Write what a body, or a chunk, holds. Raises KeyError, TypeError or ValueError on one that is no completion."""
        usage = body.get("usage") or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if cached:
            self._progress.on_prompt(num_cached_tokens=cached)
        for choice in body["choices"]:
            self._progress.on_prompt(choice.get("prompt_token_ids"), _prompt_logprobs(choice.get("prompt_logprobs")))
            piece = Piece(
                text=choice["text"],
                token_ids=choice.get("token_ids") or [],
                logprobs=_logprobs(choice.get("logprobs") or {}) if self._tells_logprobs else None,
                finish_reason=choice.get("finish_reason"),
                stop_reason=choice.get("stop_reason"),
            )
            self._progress.add(choice["index"], piece)


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of server-sent events, one line each, from pieces of a stream that may be cut anywhere."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip()


def _logprobs(body: Mapping[str, Any]) -> list[TokenLogprobs]:
    tokens, of_tokens, tops = body.get("tokens") or [], body.get("token_logprobs") or [], body.get("top_logprobs") or []
    return [_of_token(token, own, top or {}) for token, own, top in zip(tokens, of_tokens, tops, strict=True)]


def _of_token(token: str, logprob: float | None, top: Mapping[str, float]) -> TokenLogprobs:
    if logprob is None:
        return {}
    ranked = {_token_id(name): Logprob(other, rank + 1) for rank, (name, other) in enumerate(top.items())}
    return {_token_id(token): Logprob(logprob), **ranked}


def _token_id(name: str) -> int:
    return int(name.removeprefix(_ID_PREFIX))


def _prompt_logprobs(entries: Sequence[Mapping[str, Any] | None] | None) -> list[TokenLogprobs | None] | None:
    if entries is None:
        return None
    return [
        None
        if entry is None
        else {int(token_id): Logprob(one["logprob"], one["rank"]) for token_id, one in entry.items()}
        for entry in entries
    ]
