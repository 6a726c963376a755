"""Bodies of the OpenAI routes, less what they share (:mod:`kvrelay.gateway.sampling_schema`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from kvrelay.gateway.chats import ChatRequest
from kvrelay.gateway.contents import ROLES, checked_role, text_of
from kvrelay.gateway.sampling_schema import MAX_LOGPROBS, SamplingBody, TokenId, TokenIds

_MESSAGE_SCHEMA = {
    "type": "object",
    "description": "One message; what else it has goes to the chat template as it is.",
    "required": ["role"],
    "properties": {
        "role": {"enum": list(ROLES), "description": "Who speaks."},
        "content": {
            "description": "What is said: a text, or text parts, which are put together.",
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}],
        },
        "tool_calls": {
            "description": "Calls that the assistant asked for.",
            "type": "array",
            "items": {"type": "object"},
        },
        "tool_call_id": {"description": "The call that a message of role tool answers.", "type": "string"},
    },
}
Messages = Annotated[
    list[dict[str, Any]],
    Field(min_length=1, fail_fast=True),
    WithJsonSchema({"type": "array", "minItems": 1, "items": _MESSAGE_SCHEMA}),
]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class ChatBody(SamplingBody):
    """``POST /v1/chat/completions``"""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
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
            [_checked(message, f"messages[{index}]") for index, message in enumerate(self.messages)],
            self.tools,
            self.tool_choice,
            allows_parallel=self.parallel_tool_calls is not False,
            continues=bool(self.continue_final_message),
            echoes=bool(self.echo),
            add_generation_prompt=self.add_generation_prompt is not False,
            variables=variables,
        )


def _checked(message: dict[str, Any], param: str) -> dict[str, Any]:
    content = message.get("content")
    text = None if content is None else text_of(content, f"{param}.content")
    return {**message, "role": checked_role(message.get("role"), param), "content": text}


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
    messages: Messages | None = None
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
