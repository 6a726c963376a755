"""Bodies of the OpenAI routes, less what they share (:mod:`kvrelay.gateway.sampling_schema`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvrelay.gateway.chats import ChatRequest
from kvrelay.gateway.sampling_schema import MAX_LOGPROBS, SamplingBody, TokenId, TokenIds


class TextPart(BaseModel):
    """A piece of a message's text."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message; what else it has goes to the chat template as it is."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None

    def body(self) -> dict[str, Any]:
        """The message, text in one piece."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return {**(self.model_extra or {}), "role": self.role, "content": content}


class ChatBody(SamplingBody):
    """``POST /v1/chat/completions``"""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str, Field(max_length=16)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None

    def chat(self) -> ChatRequest:
        """The conversation, and how to go on with it."""
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", self.reasoning_effort)
        return ChatRequest(
            [message.body() for message in self.messages],
            self.tools,
            self.tool_choice,
            allows_parallel=self.parallel_tool_calls is not False,
            continues=bool(self.continue_final_message),
            echoes=bool(self.echo),
            add_generation_prompt=self.add_generation_prompt is not False,
            variables=variables,
        )


class CompletionBody(SamplingBody):
    """``POST /v1/completions``"""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=128, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=128, fail_fast=True)]
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class TokenizeBody(BaseModel):
    """``POST /tokenize``, as vLLM's: a text, or a chat."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(BaseModel):
    """``POST /detokenize``, as vLLM's."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=1_000_000, fail_fast=True)]
