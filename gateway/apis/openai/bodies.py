"""Bodies of the OpenAI routes, less what they share (:mod:`kvrelay.gateway.apis.openai.sampling`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from kvrelay.gateway.apis.openai.messages import ROLES, checked_messages
from kvrelay.gateway.apis.openai.sampling import MAX_LOGPROBS, MAX_PROMPTS, SamplingBody, TokenIds
from kvrelay.gateway.chat.chat import Chat, read_chat
from kvrelay.gateway.model import Model

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
    """The conversation so far."""
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    """At most so many tokens are generated; goes before `max_tokens`."""
    logprobs: bool | None = None
    """Whether tokens come with log probabilities."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Log probabilities of so many likeliest tokens; needs `logprobs`."""
    tools: list[dict[str, Any]] | None = None
    """Functions that the model may call."""
    tool_choice: str | dict[str, Any] | None = None
    """`auto`, `none`, `required`, or the function to call."""
    parallel_tool_calls: bool | None = None
    """Whether one answer may ask for several calls, as by default."""
    reasoning_effort: Effort | None = None
    """How much the model should think; for its chat template."""
    chat_template_kwargs: dict[str, Any] | None = None
    """More names for the chat template, such as `enable_thinking`."""
    add_generation_prompt: bool | None = None
    """Whether the chat template opens the answer, as by default."""
    continue_final_message: bool | None = None
    """Whether the last message is the beginning of the answer."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds special tokens to what the template wrote."""
    echo: bool | None = None
    """Whether the answer repeats the message that it continues."""

    def chat(self, model: Model) -> Chat:
        """The conversation as the model's prompt. Raises InvalidRequestError naming the field that is wrong."""
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", self.reasoning_effort)
        return read_chat(
            model.template,
            model.dialect,
            checked_messages(self.messages),
            tools=self.tools,
            tool_choice=self.tool_choice,
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
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    )
    """A text or token ids to continue, or a list of either."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Log probabilities of the tokens, and of so many likeliest others."""
    echo: bool | None = None
    """Whether the answer begins with the prompt."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds special tokens, as by default."""
