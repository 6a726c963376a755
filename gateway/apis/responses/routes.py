"""OpenAI's ``POST /v1/responses``: its body, and its input items as a conversation. Nothing is kept between requests."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from kvrelay.common.sampling import Guide, GuideKind
from kvrelay.gateway.apis.answer_docs import REQUEST_HEADERS, ResponseAnswer, answers
from kvrelay.gateway.apis.answering import chat_of, model_for, respond
from kvrelay.gateway.apis.openai.bodies import Effort, beginning_of, checked_role, content_of_role
from kvrelay.gateway.apis.openai.contents import content_of
from kvrelay.gateway.apis.openai.output_format import format_guide, make_guide
from kvrelay.gateway.apis.openai.sampling import BOOKKEEPING, MAX_LOGPROBS, OpenAIBody, refuse_unsupported
from kvrelay.gateway.apis.responses.answer import ResponseFormat
from kvrelay.gateway.chat.dialect import Chat, read_chat
from kvrelay.gateway.chat.images import Gallery
from kvrelay.gateway.errors import InvalidRequestError
from kvrelay.gateway.http.request import ApiRequest, ApiRoute, RequestBody
from kvrelay.gateway.model import Model
from kvrelay.gateway.relay.request import GenerationSpec

router = APIRouter(route_class=ApiRoute, tags=["OpenAI"])

_LOGPROBS = "message.output_text.logprobs"

# The values that ask for nothing. Any other value is refused: the gateway keeps nothing between requests and runs no tool.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "truncation": ("disabled",),
}


class Reasoning(RequestBody):
    """How the model thinks."""

    effort: Effort | None = None
    """How much the model should think; for its chat template."""


class ResponseBody(OpenAIBody):
    """``POST /v1/responses``. ``store``, ``metadata``, ``user`` and similar fields are accepted and have no effect here."""

    known_extras = frozenset(BOOKKEEPING | _HARMLESS.keys())

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]
    """A text, or the items of the conversation so far. Messages of users and results of tools may have images, as data: URLs."""
    instructions: str | None = None
    """A system message in front of the input."""
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    """At most so many tokens are generated."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Log probabilities of so many likeliest tokens."""
    tools: list[dict[str, Any]] | None = None
    """Functions that the model may call."""
    tool_choice: str | dict[str, Any] | None = None
    """`auto`, `none`, `required`, or the function to call."""
    parallel_tool_calls: bool | None = None
    """Whether one answer may ask for several calls, as by default."""
    text: dict[str, Any] | None = None
    """What the answer must match, in `format`."""
    reasoning: Reasoning | None = None
    """How the model thinks."""
    include: list[str] | None = None
    """`message.output_text.logprobs` asks for log probabilities."""
    metadata: dict[str, Any] | None = None
    """Comes back with the response."""

    @property
    def effort(self) -> Effort | None:
        """How much the model should think."""
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def shows_logprobs(self) -> bool:
        """Whether the answer's tokens come with log probabilities."""
        return self.top_logprobs is not None or _LOGPROBS in (self.include or ())

    def spec(self) -> GenerationSpec:
        """The body as a GenerationSpec. Raises InvalidRequestError naming the refused field."""
        hint = "nothing is kept between requests: send the whole conversation as input"
        refuse_unsupported(self._extras, _HARMLESS, hint)
        return GenerationSpec(
            **self.model_dump(include={"temperature", "top_p", "seed", "cache_salt"}, exclude_none=True),
            max_tokens=self.max_output_tokens,
            max_tokens_param="max_output_tokens",
            num_logprobs=(self.top_logprobs or 0) if self.shows_logprobs else None,
            guide=(guide := self._guide()),
            guide_param=None if guide is None else "text.format",
        )

    def beginning(self) -> str:
        """Instructions, and the input up to the first message of the user."""
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        return beginning_of([{"content": self.instructions}, *items])

    def chat(self, model: Model) -> Chat:
        """The conversation as the model's prompt. Raises InvalidRequestError naming the wrong item."""
        messages: list[dict[str, Any]] = []
        gallery = Gallery()
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            for index, item in enumerate(self.input):
                _add_item(messages, item, f"input[{index}]", gallery)
            messages = [message for message in messages if not _has_only_thoughts(message)]
        choice = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "function" and "function" not in choice:
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        return read_chat(
            model.template,
            model.dialect,
            messages,
            tools=self.tools,
            tool_choice=choice,
            allows_parallel=self.parallel_tool_calls is not False,
            variables={} if self.effort is None else {"reasoning_effort": self.effort},
            images=gallery.images,
            given={"input": self.input, "instructions": self.instructions, "tools": self.tools},
        )

    def _guide(self) -> Guide | None:
        form = (self.text or {}).get("format")
        if isinstance(form, dict) and form.get("type") == "json_schema":
            if "schema" not in form:
                raise InvalidRequestError("text.format has no schema", param="text")
            return make_guide(GuideKind.JSON_SCHEMA, form["schema"], "text.format.schema")
        return format_guide(form, "text.format")


def _add_item(messages: list[dict[str, Any]], item: Mapping[str, Any], param: str, gallery: Gallery) -> None:
    kind = item.get("type", "message")
    match kind:
        case "message":
            role = checked_role(item.get("role"), param)
            content = content_of_role(role, item.get("content"), f"{param}.content", gallery)
            if role == "assistant" and messages and _has_only_thoughts(messages[-1]):
                messages[-1]["content"] = content
            else:
                messages.append({"role": role, "content": content})
        case "function_call":
            name, arguments = item.get("name"), item.get("arguments")
            if not isinstance(name, str) or not isinstance(arguments, str):
                raise InvalidRequestError(f"{param} needs a name and arguments, both texts", param=param)
            call = {
                "id": item.get("call_id"),
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            if messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        case "function_call_output":
            output = content_of(item.get("output"), f"{param}.output", gallery)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        case "reasoning":  # of the message or the calls behind it; the template decides how long the model sees it
            if thoughts := _thoughts(item, param):
                messages.append({"role": "assistant", "content": None, "reasoning_content": thoughts})
        case _:
            raise InvalidRequestError(
                f"{param}.type is {str(kind)[:80]!r}; it must be message, function_call, function_call_output or reasoning",
                param=param,
            )


def _thoughts(item: Mapping[str, Any], param: str) -> str:
    """The text of a reasoning item, or else its summary. It is empty if only OpenAI's servers could read the item."""
    name = "content" if item.get("content") else "summary"
    parts = item.get(name) or []
    if not isinstance(parts, list) or not all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts
    ):
        raise InvalidRequestError(
            f"{param}.{name} must be a list of parts with a text, not {str(parts)[:80]!r}", param=f"{param}.{name}"
        )
    return "".join(part["text"] for part in parts)


def _has_only_thoughts(message: Mapping[str, Any]) -> bool:
    """Whether the message or the calls of these thoughts have not come."""
    return "reasoning_content" in message and message["content"] is None and "tool_calls" not in message


@router.post("/v1/responses", responses=answers(ResponseAnswer), openapi_extra=REQUEST_HEADERS)
async def create_response(body: ResponseBody, request: ApiRequest) -> Response:
    """Answer a conversation."""
    model = model_for(request, body.model, body.conversation)
    model.check(request.flow())
    chat, sequences = await chat_of(model, request, lambda: (body.spec(), body.chat(model)), "input")
    head = _head(body, request, model.name)
    written = ResponseFormat(head, model.tokenizer, chat.parser(), shows_logprobs=body.shows_logprobs)
    return await respond(request, model, sequences, written, is_stream=bool(body.stream), ignored=body.ignored())


def _head(body: ResponseBody, request: ApiRequest, model_name: str) -> dict[str, Any]:
    return {
        "id": f"resp_{request.internal_id}",
        "object": "response",
        "created_at": int(time.time()),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model_name,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": body.effort, "summary": None},
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
    }
