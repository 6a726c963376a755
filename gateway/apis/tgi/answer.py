"""The bodies of TGI's generate routes, whole and as events: one event for each token, even if several tokens arrive together.

TGI cuts nothing off: a stop string is part of the text. Special tokens are among the tokens but not in the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvrelay.common.sampling import FinishReason, SampledToken
from kvrelay.gateway.apis.answering import Choice, Format
from kvrelay.gateway.apis.openai.completion_answer import finite
from kvrelay.gateway.errors import ApiError, tgi_error
from kvrelay.gateway.http.sse import sse
from kvrelay.gateway.relay.request import GenerationRequest
from kvrelay.gateway.text.output import TextDelta, Usage
from kvrelay.gateway.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Wanted:
    """The fields beside the text that the client asked for."""

    details: bool = False
    prefill: bool = False  # the prompt's tokens among the details
    top_tokens: bool = False
    prefix: str = ""  # what the text begins with: the prompt, or nothing
    is_list: bool = False  # a whole answer is a list of one


class GenerateFormat(Format):
    """Answers of ``/generate``, ``/generate_stream`` and ``/``."""

    def __init__(self, tokenizer: Tokenizer, sequence: GenerationRequest, wanted: Wanted) -> None:
        """``sequence``: the prompt's first sequence. The others differ only in their sampling noise."""
        self._tokenizer = tokenizer
        self._special_ids = tokenizer.skipped_ids.union(tokenizer.eos_ids)
        self._prompt_ids = sequence.prompt_token_ids
        self._sampling = sequence.sampling
        self._wanted = wanted
        # The state of a stream:
        self._detokenizer = tokenizer.detokenizer(prompt=self._prompt_ids)
        self._texts: list[str] = []
        self._num_tokens = 0
        self._held: list[SampledToken] = []  # the last token, while it is not known whether it ends the text

    def chunk(self, index: int, delta: TextDelta, usage: Usage) -> bytes:
        """An event for each token; the last one has the text."""
        self._texts.append(delta.text)
        tokens = [*self._held, *delta.tokens]
        self._held = []
        is_over = delta.finish_reason is not None
        if not is_over and self._num_tokens + len(tokens) == self._sampling.max_tokens:
            self._held = [tokens.pop()]
        assert tokens or not is_over, "a stream ended without a token that could tell so"
        events: list[bytes] = []
        for token in tokens:
            self._num_tokens += 1
            text = self._detokenizer.push([token.token_id])
            is_last = is_over and token is tokens[-1]
            body = self._event(token, text + self._detokenizer.finish() if is_last else text)
            if is_last:
                body["generated_text"] = self._wanted.prefix + "".join(self._texts)
                if self._wanted.details:
                    body["details"] = {
                        "finish_reason": _finish_reason(delta),
                        "generated_tokens": self._num_tokens,
                        "seed": self._seed,
                        "input_length": len(self._prompt_ids),
                    }
            events.append(sse(body))
        return b"".join(events)

    def failed(self, error: ApiError) -> bytes:
        """The error."""
        return sse(tgi_error(error)[1])

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any] | list[Any]:
        """The body of an answer that is not streamed: the likeliest choice, by log probability per token."""
        best = max(choices, key=lambda choice: choice.mean_logprob)
        body: dict[str, Any] = {"generated_text": self._wanted.prefix + best.text}
        if self._wanted.details:
            details = self._details(best)
            if len(choices) > 1:
                details["best_of_sequences"] = [
                    {"generated_text": self._wanted.prefix + other.text, **self._details(other)}
                    for other in choices
                    if other is not best
                ]
            body["details"] = details
        return [body] if self._wanted.is_list else body

    @property
    def _seed(self) -> int | None:
        """The seed that tokens were drawn with; None if none was drawn."""
        return self._sampling.seed if self._sampling.temperature else None

    def _event(self, token: SampledToken, text: str) -> dict[str, Any]:
        body: dict[str, Any] = {"index": self._num_tokens, "token": self._token(token.token_id, token.logprob, text)}
        if self._wanted.top_tokens:
            body["top_tokens"] = self._top_tokens(token)
        return {**body, "generated_text": None, "details": None}

    def _details(self, choice: Choice) -> dict[str, Any]:
        tokens = choice.tokens
        detokenizer = self._tokenizer.detokenizer(prompt=self._prompt_ids)
        texts = [detokenizer.push([token.token_id]) for token in tokens]
        if texts:
            texts[-1] += detokenizer.finish()
        details: dict[str, Any] = {
            "finish_reason": _finish_reason(choice.deltas[-1]),
            "generated_tokens": len(tokens),
            "seed": self._seed,
            "prefill": self._prefill(choice.prompt_logprobs) if self._wanted.prefill else [],
            "tokens": [
                self._token(token.token_id, token.logprob, text) for token, text in zip(tokens, texts, strict=True)
            ],
        }
        if self._wanted.top_tokens:
            details["top_tokens"] = [self._top_tokens(token) for token in tokens]
        return details

    def _prefill(self, known: Sequence[SampledToken] | None) -> list[dict[str, Any]]:
        """The prompt's tokens. The first one follows nothing, so it has no log probability."""
        logprobs = [None, *(finite(token.logprob) for token in known or ())]
        return [
            {"id": token_id, "text": self._tokenizer.token_text(token_id), "logprob": logprob}
            for token_id, logprob in zip(self._prompt_ids, logprobs, strict=True)
        ]

    def _top_tokens(self, token: SampledToken) -> list[dict[str, Any]]:
        return [
            self._token(token_id, logprob, self._tokenizer.token_text(token_id))
            for token_id, logprob in token.top_logprobs
        ]

    def _token(self, token_id: int, logprob: float | None, text: str) -> dict[str, Any]:
        return {"id": token_id, "text": text, "logprob": finite(logprob), "special": token_id in self._special_ids}


def _finish_reason(delta: TextDelta) -> str:
    if delta.finish_reason is FinishReason.LENGTH:
        return "length"
    return "stop_sequence" if delta.stop_reason is not None else "eos_token"
