"""Bodies of the OpenAI routes, without the fields they share (:mod:`kvrelay.gateway.apis.openai.sampling`).

Messages are checked by hand. A pydantic model would hold the interpreter's lock while it checks a hundred thousand of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from kvrelay.gateway.apis.openai.contents import CONTENT_SCHEMA, content_of
from kvrelay.gateway.apis.openai.sampling import MAX_LOGPROBS, MAX_PROMPTS, SamplingBody, TokenIds
from kvrelay.gateway.chat.dialect import Chat, read_chat
from kvrelay.gateway.chat.images import Gallery, is_image
from kvrelay.gateway.errors import InvalidRequestError
from kvrelay.gateway.model import Model

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_WITH_CONTENT = ("system", "developer", "user")  # others may have calls, thoughts or an empty result instead
_WITH_IMAGES = ("user", "tool", "function")  # roles whose messages may have images
BEGINNING_LEN = 256  # characters of a message, or tokens of a prompt, that identify a conversation


def checked_messages(messages: Sequence[Mapping[str, Any]], gallery: Gallery) -> list[dict[str, Any]]:
    """The messages of a chat, with each content as one text, or as parts if it has images. ``gallery`` takes these.

    Raises InvalidRequestError naming the wrong message.
    """
    return [_checked(message, f"messages[{index}]", gallery) for index, message in enumerate(messages)]


def content_of_role(role: str, content: Any, param: str, gallery: Gallery) -> str | list[dict[str, Any]]:
    """The content of a message of that role, as :func:`content_of` has it. Raises InvalidRequestError."""
    return content_of(content, param, gallery if role in _WITH_IMAGES else None)


def checked_role(role: Any, param: str) -> str:
    """The role of the message ``param``. Raises InvalidRequestError if it is not a known role."""
    if role not in ROLES:
        wrong = f"{param} has no role" if role is None else f"{param}.role is {str(role)[:80]!r}"
        raise InvalidRequestError(f"{wrong}; it must be one of {', '.join(ROLES)}", param=param)
    return str(role)


def beginning_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """How a conversation begins: the first characters of each message up to the first user message. Does not validate anything."""
    starts: list[str] = []
    for message in messages:
        content = message.get("content")
        # An image may come first, and does not tell conversations apart.
        part = next((one for one in content if not is_image(one)), None) if isinstance(content, list) else content
        text = part.get("text") if isinstance(part, Mapping) else part
        starts.append(text[:BEGINNING_LEN] if isinstance(text, str) else "")
        if message.get("role") == "user":
            break
    return "\0".join(starts)


def _checked(message: Mapping[str, Any], param: str, gallery: Gallery) -> dict[str, Any]:
    role, content = checked_role(message.get("role"), param), message.get("content")
    if content is None and role in _WITH_CONTENT:
        raise InvalidRequestError(
            f"{param} has no content; give it a text, or a list of parts", param=f"{param}.content"
        )
    told = None if content is None else content_of_role(role, content, f"{param}.content", gallery)
    return {**message, "role": role, "content": told}


_MESSAGE_SCHEMA = {
    "type": "object",
    "description": "One message; what else it has goes to the chat template as it is.",
    "required": ["role"],
    "properties": {
        "role": {"enum": list(ROLES), "description": "Who speaks."},
        "content": CONTENT_SCHEMA,
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
        variables, gallery = dict(self.chat_template_kwargs or {}), Gallery()
        if self.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", self.reasoning_effort)
        return read_chat(
            model.template,
            model.dialect,
            checked_messages(self.messages, gallery),
            tools=self.tools,
            tool_choice=self.tool_choice,
            allows_parallel=self.parallel_tool_calls is not False,
            continues=bool(self.continue_final_message),
            echoes=bool(self.echo),
            add_generation_prompt=self.add_generation_prompt is not False,
            variables=variables,
            images=gallery.images,
            given={"messages": self.messages, "tools": self.tools, "chat_template_kwargs": variables},
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
