"""The bodies of OpenAI's text completions, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvrelay.common.sampling import SampledToken
from kvrelay.gateway.apis.answering import Choice
from kvrelay.gateway.apis.openai.answer_parts import OpenAIFormat, Shown, prompt_logprobs, text_logprobs
from kvrelay.gateway.text.output import TextDelta, Usage
from kvrelay.gateway.text.tokenizer import Tokenizer


class CompletionFormat(OpenAIFormat):
    """Answers of ``/v1/completions``."""

    def __init__(
        self,
        head: dict[str, Any],
        tokenizer: Tokenizer,
        shown: Shown,
        *,
        num_per_prompt: int = 1,
        echoed: Sequence[tuple[str, Sequence[int]]] = (),
        prompts: Sequence[Sequence[int]] = (),
    ) -> None:
        """``echoed``: text and token ids of each prompt, if choices begin with them; ``num_per_prompt`` choices have the same.

        ``prompts``: the token ids of each prompt, to be told with each choice's first tokens if token ids are shown.
        """
        super().__init__(head, "text_completion", tokenizer, shown)
        self._num_per_prompt = num_per_prompt
        self._echoed = echoed
        self._prompts = prompts
        self._offsets: dict[int, int] = {}  # by choice: characters sent so far; there from its first delta on
        self._prompt_logprobs: dict[int, list[SampledToken]] = {}  # by prompt

    def chunk(self, index: int, delta: TextDelta) -> bytes:
        """One chunk of a stream."""
        return self._event([self._choice(Choice(index, [delta]))])

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
