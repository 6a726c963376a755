"""The bodies of OpenAI's chat completions, whole and in chunks: text, reasoning, tool calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvrelay.common.sampling import FinishReason
from kvrelay.gateway.errors import ApiError
from kvrelay.gateway.formats import AnswerHead, Shown
from kvrelay.gateway.generation import TextDelta, Usage
from kvrelay.gateway.jobs import Choice
from kvrelay.gateway.logprob_bodies import chat_logprobs, prompt_logprobs
from kvrelay.gateway.sse import DONE, ChunkTemplate, sse
from kvrelay.gateway.tokenizer import Tokenizer
from kvrelay.gateway.tools.calls import OutputParser, ParsedDelta, ToolCallDelta


class ChatFormat:
    """Answers of ``/v1/chat/completions``. Implements :class:`kvrelay.gateway.jobs.Format`."""

    def __init__(
        self,
        head: AnswerHead,
        tokenizer: Tokenizer,
        shown: Shown,
        *,
        num_choices: int = 1,
        make_parser: Callable[[], OutputParser] | None = None,
        echoed: str = "",
    ) -> None:
        """``make_parser``: what finds reasoning and tool calls in one choice's text; None: all of it is content.

        ``echoed``: text that every choice begins with.
        """
        self._head = head
        self._chunk_head = head.body("chatcmpl", "chat.completion.chunk")
        self._template = ChunkTemplate(self._chunk_head, "choices")
        self._tokenizer = tokenizer
        self._shown = shown
        self._num_choices = num_choices
        self._echoed = echoed
        parsers = None if make_parser is None else [make_parser() for _ in range(num_choices)]
        self._parsers = parsers
        self._has_called = [False] * num_choices

    def opening(self) -> bytes:
        """The chunks that say who speaks."""
        events: list[bytes] = []
        for index in range(self._num_choices):
            delta = {"role": "assistant", "content": self._echoed}
            events.append(self._chunk([{"index": index, "delta": delta, "finish_reason": None}]))
        return b"".join(events)

    def chunk(self, index: int, delta: TextDelta) -> bytes:
        """One chunk of a stream; none for text that is held back because it may be a marker's beginning."""
        choice: dict[str, Any] = {"index": index, "delta": {}, "finish_reason": delta.finish_reason}
        if self._parsers is None:
            if delta.text:
                choice["delta"] = {"content": delta.text}
        else:
            choice["delta"] = self._parsed(index, self._parsers[index], delta)
            if delta.finish_reason is FinishReason.STOP and self._has_called[index]:
                choice["finish_reason"] = "tool_calls"
        if delta.stop_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self._shown.logprobs:
            choice["logprobs"] = chat_logprobs(self._tokenizer, delta.tokens, ids_as_tokens=self._shown.ids_as_tokens)
        if self._shown.token_ids:
            choice["token_ids"] = [token.token_id for token in delta.tokens]
        more: dict[str, Any] = {}
        if self._shown.prompt_logprobs and delta.prompt_logprobs is not None:
            more["prompt_logprobs"] = prompt_logprobs(self._tokenizer, delta.prompt_logprobs)
        is_silent = self._parsers is not None and not choice["delta"] and delta.finish_reason is None
        if is_silent and not more and not self._shown.logprobs and not self._shown.token_ids:
            return b""
        return self._chunk([choice], **more)

    def closing(self, usage: Usage, extras: dict[str, object]) -> bytes:
        """Usage, if asked for, and the end."""
        return (self._chunk([], usage=usage.body(), **extras) if self._shown.usage else b"") + DONE

    def failed(self, error: ApiError) -> bytes:
        """The error, and the end."""
        return sse(error.body()) + DONE

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        bodies = [self._choice(choice) for choice in choices]
        body = {**self._head.body("chatcmpl", "chat.completion"), "choices": bodies, "usage": usage.body()}
        if self._shown.prompt_logprobs and (known := choices[0].prompt_logprobs) is not None:
            body["prompt_logprobs"] = prompt_logprobs(self._tokenizer, known)
        return body

    def _choice(self, choice: Choice) -> dict[str, Any]:
        last = choice.deltas[-1]
        message: dict[str, Any] = {"role": "assistant", "content": self._echoed + choice.text, "refusal": None}
        finish_reason: str | None = last.finish_reason
        if self._parsers is not None:
            message |= _message(self._parsers[choice.index], choice.text, self._echoed)
            if finish_reason == FinishReason.STOP and message.get("tool_calls"):
                finish_reason = "tool_calls"
        body: dict[str, Any] = {
            "index": choice.index,
            "message": message,
            "finish_reason": finish_reason,
            "stop_reason": last.stop_reason,
            "logprobs": None,
        }
        if self._shown.logprobs:
            body["logprobs"] = chat_logprobs(self._tokenizer, choice.tokens, ids_as_tokens=self._shown.ids_as_tokens)
        if self._shown.token_ids:
            body["token_ids"] = [token.token_id for token in choice.tokens]
        return body

    def _parsed(self, index: int, parser: OutputParser, delta: TextDelta) -> dict[str, Any]:
        parts = [parser.push(delta.text)]
        if delta.finish_reason is not None:
            parts.append(parser.finish())
        body: dict[str, Any] = {}
        if content := "".join(part.content for part in parts):
            body["content"] = content
        if reasoning := "".join(part.reasoning for part in parts):
            body["reasoning_content"] = reasoning
        if calls := [call for part in parts for call in part.calls]:
            self._has_called[index] = True
            body["tool_calls"] = [_call_delta(call) for call in calls]
        return body

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return sse({**self._chunk_head, "choices": choices, **more}) if more else self._template.event(choices)


def _message(parser: OutputParser, text: str, echoed: str) -> dict[str, Any]:
    """Content, reasoning and calls of a whole answer."""
    parts: list[ParsedDelta] = [parser.push(text), parser.finish()]
    content = echoed + "".join(part.content for part in parts)
    message: dict[str, Any] = {"content": content}
    if reasoning := "".join(part.reasoning for part in parts):
        message["reasoning_content"] = reasoning
    calls: dict[int, dict[str, Any]] = {}
    for delta in (call for part in parts for call in part.calls):
        call = calls.setdefault(
            delta.index, {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
        )
        call["id"] = delta.id or call["id"]
        call["function"]["name"] = delta.name or call["function"]["name"]
        call["function"]["arguments"] += delta.arguments
    if calls:
        message["tool_calls"] = list(calls.values())
        message["content"] = content or None
    return message


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
