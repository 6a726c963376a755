"""The bodies of OpenAI's chat completions, whole and in chunks: text, reasoning, tool calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvrelay.common.sampling import FinishReason, SampledToken
from kvrelay.gateway.apis.answering import Choice
from kvrelay.gateway.apis.openai.completion_answer import OpenAIFormat, Shown, chat_logprobs, prompt_logprobs
from kvrelay.gateway.chat.tools.calls import ToolCallDelta
from kvrelay.gateway.chat.tools.parser import CallParser
from kvrelay.gateway.text.output import TextDelta, Usage
from kvrelay.gateway.text.tokenizer import Tokenizer


class ChatFormat(OpenAIFormat):
    """Answers of ``/v1/chat/completions``."""

    def __init__(
        self,
        head: dict[str, Any],
        tokenizer: Tokenizer,
        shown: Shown,
        *,
        num_choices: int,
        make_parser: Callable[[], CallParser] | None,
        echoed: str,
    ) -> None:
        """``make_parser``: what finds reasoning and tool calls in one choice's text; None: all of it is content.

        ``echoed``: text that every choice begins with.
        """
        super().__init__(head, "chat.completion.chunk", tokenizer, shown)
        self._num_choices = num_choices
        self._echoed = echoed
        self._parsers = None if make_parser is None else [make_parser() for _ in range(num_choices)]
        self._has_called = [False] * num_choices

    def opening(self, usage: Usage) -> bytes:
        """The chunks that give the role."""
        delta = {"role": "assistant", "content": self._echoed}
        choices = [{"index": index, "delta": delta, "finish_reason": None} for index in range(self._num_choices)]
        so_far = self._so_far(replace(usage, num_output_tokens=0))  # no choice has sent output yet
        return b"".join([self._event([choice], **so_far) for choice in choices])

    def chunk(self, index: int, delta: TextDelta, usage: Usage) -> bytes:
        """One chunk of a stream; empty while the text is held back: it may begin a marker, or end inside a character."""
        said = {"content": delta.text} if delta.text else {}
        if self._parsers is not None:
            said = self._said(index, delta.text, is_over=delta.finish_reason is not None)
        choice = {"index": index, "delta": said, "finish_reason": self._finish_reason(index, delta)}
        if delta.stop_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        choice |= self._of_tokens(delta.tokens)
        more: dict[str, Any] = {}
        if self._shown.prompt_logprobs and delta.prompt_logprobs is not None:
            more["prompt_logprobs"] = prompt_logprobs(self._tokenizer, delta.prompt_logprobs)
        is_silent = not said and delta.finish_reason is None
        if is_silent and not more and not self._shown.logprobs and not self._shown.token_ids:
            return b""
        return self._event([choice], **self._so_far(usage), **more)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        bodies = [self._choice(choice) for choice in choices]
        body = {**self._head, "choices": bodies, "usage": usage.body()}
        if self._shown.prompt_logprobs and (known := choices[0].prompt_logprobs) is not None:
            body["prompt_logprobs"] = prompt_logprobs(self._tokenizer, known)
        return body

    def _choice(self, choice: Choice) -> dict[str, Any]:
        last = choice.deltas[-1]
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if self._parsers is not None:
            message |= {"content": "", **self._said(choice.index, choice.text, is_over=True)}
        message["content"] = self._echoed + message["content"]
        if calls := message.get("tool_calls"):
            message["tool_calls"] = _whole_calls(calls)
            message["content"] = message["content"] or None
        return {
            "index": choice.index,
            "message": message,
            "finish_reason": self._finish_reason(choice.index, last),
            "stop_reason": last.stop_reason,
            "logprobs": None,
            **self._of_tokens(choice.tokens),
        }

    def _said(self, index: int, text: str, *, is_over: bool) -> dict[str, Any]:
        """The delta fields for new text of a choice: content, reasoning and calls."""
        assert self._parsers is not None
        parsed = self._parsers[index].push(text)
        if is_over:
            parsed += self._parsers[index].finish()
        body: dict[str, Any] = {}
        if parsed.content:
            body["content"] = parsed.content
        if parsed.reasoning:
            body["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            self._has_called[index] = True
            body["tool_calls"] = [_call_delta(call) for call in parsed.calls]
        return body

    def _finish_reason(self, index: int, delta: TextDelta) -> str | None:
        return (
            "tool_calls"
            if delta.finish_reason is FinishReason.STOP and self._has_called[index]
            else delta.finish_reason
        )

    def _of_tokens(self, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        """The token ids and log probabilities that the client asked for."""
        body: dict[str, Any] = {}
        if self._shown.logprobs:
            body["logprobs"] = chat_logprobs(self._tokenizer, tokens, ids_as_tokens=self._shown.ids_as_tokens)
        if self._shown.token_ids:
            body["token_ids"] = [token.token_id for token in tokens]
        return body


def _whole_calls(deltas: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tool calls of an answer that is not streamed, joined from the pieces that a stream would have."""
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        if "id" in delta:
            calls[delta["index"]] = {"id": delta["id"], "type": "function", "function": delta["function"]}
        else:
            calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    return list(calls.values())


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
