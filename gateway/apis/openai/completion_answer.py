"""The bodies of text completions, whole and in chunks, and the parts that chats share with them, such as log probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvrelay.common.sampling import SampledToken
from kvrelay.gateway.apis.answering import Choice, Format
from kvrelay.gateway.errors import ApiError
from kvrelay.gateway.http.sse import DONE, ChunkTemplate, sse
from kvrelay.gateway.text.output import TextDelta, Usage
from kvrelay.gateway.text.tokenizer import Tokenizer

_IMPOSSIBLE = -9999.0


@dataclass(frozen=True, slots=True)
class Shown:
    """The fields beside the text that the client asked for."""

    logprobs: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    ids_as_tokens: bool = False  # in log probabilities, ``token_id:17`` instead of a token's text
    usage: bool = False  # at a stream's end; whole answers always have it
    usage_so_far: bool = False  # usage in every chunk


class OpenAIFormat(Format):
    """The parts that answers of chats and of texts share."""

    def __init__(self, head: dict[str, Any], chunk_kind: str, tokenizer: Tokenizer, shown: Shown) -> None:
        """``head``: the first fields of a whole answer. Chunks begin with them too, but have the object type ``chunk_kind``."""
        self._head = head
        # OpenAI's clients are told that the usage is still to come.
        self._chunk_head = {**head, "object": chunk_kind, **({"usage": None} if shown.usage else {})}
        self._template = ChunkTemplate(self._chunk_head, "choices")
        self._tokenizer = tokenizer
        self._shown = shown

    def closing(self, usage: Usage, extras: dict[str, object]) -> bytes:
        """The usage if the client asked for it, and the end of the stream."""
        return (self._event([], usage=usage.body(), **extras) if self._shown.usage else b"") + DONE

    def failed(self, error: ApiError) -> bytes:
        """The error and the end of the stream."""
        return sse(error.body()) + DONE

    def _so_far(self, usage: Usage) -> dict[str, Any]:
        """The usage fields that every chunk has."""
        return {"usage": usage.body()} if self._shown.usage_so_far else {}

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return sse({**self._chunk_head, "choices": choices, **more}) if more else self._template.event(choices)


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[SampledToken], *, ids_as_tokens: bool = False
) -> dict[str, Any]:
    """The ``logprobs`` object of a chat's choice.

    ``ids_as_tokens``: write ``token_id:17`` instead of the token's text, as vLLM does.
    """

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        shown = _id_text(token_id) if ids_as_tokens else tokenizer.token_text(token_id)
        return {"token": shown, "logprob": finite(logprob), "bytes": list(tokenizer.token_bytes(token_id))}

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
    """The ``logprobs`` object of a completion's choice. ``offset``: number of characters before ``tokens``.

    ``ids_as_tokens``: write ``token_id:17`` instead of the token's text, as vLLM does, because two tokens may have the same text.
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
        # A prompt's first token follows nothing, so it has no probability.
        "top_logprobs": [
            None
            if token.logprob is None
            else {shown(token_id): finite(logprob) for token_id, logprob in token.top_logprobs}
            for token in tokens
        ],
        "text_offset": offsets,
    }


def prompt_logprobs(tokenizer: Tokenizer, tokens: Sequence[SampledToken]) -> list[dict[str, Any] | None]:
    """vLLM's list: null for the prompt's first token, then one object per token, keyed by token id, with the token and its
    alternatives.

    ``rank`` counts from 1. It is null for a token that is not among the likeliest ones that were asked for.
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
    """A log probability that JSON can hold.

    OpenAI and vLLM write -9999.0 for a token of probability 0, because JSON has no infinity.
    """
    return logprob if logprob is None or math.isfinite(logprob) else _IMPOSSIBLE


class CompletionFormat(OpenAIFormat):
    """Answers of ``/v1/completions``."""

    def __init__(
        self,
        head: dict[str, Any],
        tokenizer: Tokenizer,
        shown: Shown,
        *,
        num_per_prompt: int,
        echoed: Sequence[tuple[str, Sequence[int]]],
        prompts: Sequence[Sequence[int]],
    ) -> None:
        """``echoed``: text and token ids of each prompt, if choices begin with their prompt. ``num_per_prompt`` choices share a
        prompt.

        ``prompts``: the token ids of each prompt, which each choice's first chunk carries if token ids are shown.
        """
        super().__init__(head, "text_completion", tokenizer, shown)
        self._num_per_prompt = num_per_prompt
        self._echoed = echoed
        self._prompts = prompts
        self._offsets: dict[int, int] = {}  # characters sent so far, by choice, from its first delta on
        self._prompt_logprobs: dict[int, list[SampledToken]] = {}  # by prompt

    def chunk(self, index: int, delta: TextDelta, usage: Usage) -> bytes:
        """One chunk of a stream."""
        return self._event([self._choice(Choice(index, [delta]))], **self._so_far(usage))

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        return {**self._head, "choices": [self._choice(choice) for choice in choices], "usage": usage.body()}

    def _choice(self, said: Choice) -> dict[str, Any]:
        index, text, tokens, of_prompt = said.index, said.text, said.tokens, said.prompt_logprobs
        prompt = index // self._num_per_prompt
        if of_prompt is not None:
            self._prompt_logprobs[prompt] = of_prompt
        if self._echoed and index not in self._offsets:
            prompt_text, prompt_ids = self._echoed[prompt]
            text = prompt_text + text
            if self._shown.logprobs:
                known = self._prompt_logprobs.get(prompt) or [SampledToken(token_id) for token_id in prompt_ids[1:]]
                tokens = [SampledToken(prompt_ids[0]), *known, *tokens]
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "finish_reason": said.deltas[-1].finish_reason,
            "stop_reason": said.deltas[-1].stop_reason,
            "logprobs": None,
        }
        if self._shown.token_ids and self._prompts and index not in self._offsets:
            choice["prompt_token_ids"] = self._prompts[prompt]
        offset = self._offsets.setdefault(index, 0)
        if self._shown.logprobs:
            body = text_logprobs(self._tokenizer, tokens, offset, ids_as_tokens=self._shown.ids_as_tokens)
            choice["logprobs"] = body
            self._offsets[index] = offset + sum(len(token) for token in body["tokens"])
        if self._shown.prompt_logprobs and of_prompt is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, of_prompt)
        if self._shown.token_ids:
            choice["token_ids"] = [token.token_id for token in said.tokens]
        return choice
