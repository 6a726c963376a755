"""Bodies of the OpenAI routes, without the fields they share (:mod:`kvrelay.gateway.apis.openai.sampling`).

Messages are checked by hand. A pydantic model would hold the interpreter's lock while it checks a hundred thousand of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from kvrelay.gateway.apis.openai.sampling import MAX_LOGPROBS, MAX_PROMPTS, SamplingBody, TokenIds
from kvrelay.gateway.chat.dialect import Chat, read_chat
from kvrelay.gateway.errors import InvalidRequestError
from kvrelay.gateway.model import Model

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEXT_PARTS = ("text", "input_text", "output_text")
BEGINNING_LEN = 256  # characters of a message, or tokens of a prompt, that identify a conversation


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a chat, with each content as one text. Raises InvalidRequestError naming the wrong message."""
    return [_checked(message, f"messages[{index}]") for index, message in enumerate(messages)]


def checked_role(role: Any, param: str) -> str:
    """The role of the message ``param``. Raises InvalidRequestError if it is not a known role."""
    if role not in ROLES:
        raise InvalidRequestError(
            f"{param}.role is {str(role)[:80]!r}; it must be one of {', '.join(ROLES)}", param=param
        )
    return str(role)


def text_of(content: Any, param: str, between: str = "") -> str:
    """A content as one text. It is a text, or text parts that are joined with ``between``.

    Raises InvalidRequestError, also for images.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(
            f"{param} must be a text or a list of text parts, not {str(content)[:80]!r}", param=param
        )
    pieces: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind in TEXT_PARTS and isinstance(text, str):
            pieces.append(text)
            continue
        raise InvalidRequestError(
            f'{param}[{index}] must be a text part, {{"type": "text", "text": …}}, not {str(part)[:80]!r}; '
            "this deployment reads text only: no images, audio or files",
            param=param,
        )
    return between.join(pieces)


def beginning_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """How a conversation begins: the first characters of each message up to the first user message. Does not validate anything."""
    starts: list[str] = []
    for message in messages:
        content = message.get("content")
        part = content[0] if isinstance(content, list) and content else content
        text = part.get("text") if isinstance(part, Mapping) else part
        starts.append(text[:BEGINNING_LEN] if isinstance(text, str) else "")
        if message.get("role") == "user":
            break
    return "\0".join(starts)


def _checked(message: Mapping[str, Any], param: str) -> dict[str, Any]:
    content = message.get("content")
    text = None if content is None else text_of(content, f"{param}.content")
    return {**message, "role": checked_role(message.get("role"), param), "content": text}


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
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


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

    def beginning(self) -> str:
        """The messages up to the first user message."""
        return beginning_of(self.messages)

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

    def beginning(self) -> str:
        """The beginning of the first prompt."""
        prompts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        prompt = prompts[0] if isinstance(prompts[0], str | list) else prompts
        return prompt[:BEGINNING_LEN] if isinstance(prompt, str) else str(prompt[:BEGINNING_LEN])
