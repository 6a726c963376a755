"""Anthropic's routes ``/v1/messages`` and ``/v1/messages/count_tokens``: they turn bodies into requests.

The gateway runs no tool.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import JSONResponse, Response

from kvrelay.common.sampling import Guide, GuideKind
from kvrelay.gateway.apis.answer_docs import REQUEST_HEADERS, answers
from kvrelay.gateway.apis.answering import chat_of, model_for, respond
from kvrelay.gateway.apis.anthropic.answer import AnthropicErrorBody, MessageAnswer, MessageFormat, TokenCount
from kvrelay.gateway.apis.openai.bodies import beginning_of
from kvrelay.gateway.apis.openai.contents import content_of, misplaced_image, parts_of, text_of
from kvrelay.gateway.apis.openai.output_format import make_guide
from kvrelay.gateway.apis.openai.sampling import OpenAIBody, Stops, refuse_unsupported
from kvrelay.gateway.apis.prompts import prompt_of
from kvrelay.gateway.chat.dialect import Chat, read_chat
from kvrelay.gateway.chat.images import Gallery
from kvrelay.gateway.chat.tools.messages import joined
from kvrelay.gateway.errors import InvalidRequestError
from kvrelay.gateway.http.request import ApiRequest, ApiRoute, RequestBody
from kvrelay.gateway.model import Model
from kvrelay.gateway.relay.image_texts import Patience
from kvrelay.gateway.relay.request import GenerationSpec

router = APIRouter(route_class=ApiRoute, tags=["Anthropic"])

_BOOKKEEPING = {"metadata", "service_tier", "cache_control"}  # these change no answer; prefixes are cached anyway
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "container": (),
    "mcp_servers": ([],),
}  # any other value of these fields is refused
_MODES = {"auto": "auto", "any": "required", "none": "none"}
_BETWEEN = "\n\n"  # separates texts that come as blocks of their own


class ToolChoice(RequestBody):
    """Which tools the model may, must or must not use."""

    type: Literal["auto", "any", "tool", "none"]
    """`any`: one of them, `tool`: the one that is named."""
    name: str | None = None
    """The tool to use."""
    disable_parallel_tool_use: bool | None = None
    """Whether one answer may use one tool only."""


class Thinking(RequestBody):
    """Whether the model thinks first; for its chat template."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    """Without any of them it is as the model's chat template has it."""
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    """What the template is told of how long to think; no limit."""


class OutputConfig(RequestBody):
    """How the answer is to be."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """How much the model should think; for its chat template."""
    format: dict[str, Any] | None = None
    """What the text must match: a `json_schema`."""


class CountBody(OpenAIBody):
    """``POST /v1/messages/count_tokens``"""

    known_extras = frozenset(_BOOKKEEPING | _HARMLESS.keys())

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]
    """The conversation so far. An assistant's message at its end is continued. Messages of users and results of tools may have
    images, in base64 or by URL."""
    system: str | list[dict[str, Any]] | None = None
    """A text, or text blocks, in front of the messages."""
    tools: list[dict[str, Any]] | None = None
    """Functions that the model may ask for."""
    tool_choice: ToolChoice | None = None
    """Which of them it may, must or must not use."""
    thinking: Thinking | None = None
    """Whether the model thinks first; for its chat template."""
    output_config: OutputConfig | None = None
    """How the answer is to be."""

    def conversation(self) -> str:
        """A key that the requests of one conversation share: `metadata.user_id`, or how the conversation begins."""
        metadata = self._extras.get("metadata")
        user = metadata.get("user_id") if isinstance(metadata, dict) else None
        return f"user {user}" if isinstance(user, str) and user else self.beginning()

    def beginning(self) -> str:
        """The system text and the messages up to the first user message."""
        return beginning_of([{"content": self.system}, *self.messages])

    def chat(self, model: Model) -> Chat:
        """The conversation as the model's prompt. Raises InvalidRequestError naming the wrong block."""
        refuse_unsupported(self._extras, _HARMLESS, "nothing but the model runs here; leave it out")
        messages: list[dict[str, Any]] = []
        gallery = Gallery()
        if self.system is not None:
            messages.append({"role": "system", "content": text_of(self.system, "system", _BETWEEN)})
        for index, message in enumerate(self.messages):
            _add_message(messages, message, f"messages[{index}]", gallery)
        choice = self.tool_choice or ToolChoice(type="auto")
        named = {"type": "function", "function": {"name": choice.name}}
        return read_chat(
            model.template,
            model.dialect,
            messages,
            tools=[_function(tool, f"tools[{index}]") for index, tool in enumerate(self.tools or ())],
            tool_choice=_MODES.get(choice.type, named),
            allows_parallel=not choice.disable_parallel_tool_use,
            continues=self._continues(messages[-1], choice),
            variables=self._variables(),
            images=gallery.images,
            given={"messages": self.messages, "system": self.system, "tools": self.tools},
        )

    def guide(self) -> Guide | None:
        """The guide for the text. Raises InvalidRequestError if the schema is no JSON Schema."""
        form = None if self.output_config is None else self.output_config.format
        if form is None:
            return None
        if form.get("type") != "json_schema" or "schema" not in form:
            raise InvalidRequestError('output_config.format must be {"type": "json_schema", "schema": …}')
        return make_guide(GuideKind.JSON_SCHEMA, form["schema"], "output_config.format.schema")

    def _continues(self, last: Mapping[str, Any], choice: ToolChoice) -> bool:
        if last["role"] != "assistant":
            return False
        may_call = choice.type != "none" and (self.tools or choice.type != "auto")
        if not last["content"] or may_call:
            raise InvalidRequestError(
                f"messages[{len(self.messages) - 1}] is the assistant's, so the answer continues its text; that needs a text, "
                "and cannot go with tools: end with a user's message"
            )
        return True

    def _variables(self) -> dict[str, Any]:
        variables: dict[str, Any] = {}
        if self.thinking is not None:
            thinks = self.thinking.type != "disabled"
            variables |= {"enable_thinking": thinks, "thinking": thinks}  # model families use different names
            if self.thinking.budget_tokens is not None:
                variables["thinking_budget"] = self.thinking.budget_tokens
        if self.output_config is not None and self.output_config.effort is not None:
            variables["reasoning_effort"] = self.output_config.effort
        return variables


class MessageBody(CountBody):
    """``POST /v1/messages``"""

    max_tokens: Annotated[int, Field(ge=1)]
    """At most so many tokens are generated; fewer if no more fit."""
    stop_sequences: Stops | None = None
    """The answer ends in front of any of these texts."""
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Only so many of the likeliest tokens are sampled; 0 switches it off."""

    def spec(self) -> GenerationSpec:
        """The body in our own vocabulary. Raises InvalidRequestError naming the field that is refused."""
        guide = self.guide()
        return GenerationSpec(
            **self.model_dump(include={"temperature", "top_p", "top_k", "seed", "cache_salt"}, exclude_none=True),
            max_tokens=self.max_tokens,
            shortens=True,  # the API requires max_tokens, so clients send it whatever fits the model
            stops=tuple(stop for stop in self.stop_sequences or () if stop),
            guide=guide,
            guide_param=None if guide is None else "output_config.format",
        )


def _function(tool: Mapping[str, Any], param: str) -> dict[str, Any]:
    """A client's own tool as a function. Raises InvalidRequestError for a tool that Anthropic's servers would run."""
    if (kind := tool.get("type") or "custom") != "custom":
        raise InvalidRequestError(
            f"{param}.type is {str(kind)[:80]!r}; no tool is run here: describe one of your own, with name and input_schema"
        )
    return {**tool, "type": "function"}


def _add_message(messages: list[dict[str, Any]], message: Mapping[str, Any], param: str, gallery: Gallery) -> None:
    """Append a message. Each tool result becomes a message of its own, as chat templates expect. Raises InvalidRequestError."""
    role = message.get("role")
    if role not in ("user", "assistant", "system"):
        raise InvalidRequestError(f"{param}.role is {str(role)[:80]!r}; it must be user, assistant or system")
    shown: list[tuple[int, Mapping[str, Any]]] = []  # texts and images, with their places
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(_blocks(message.get("content"), param)):
        where = f"{param}.content[{index}]"
        if not isinstance(block, Mapping):
            raise InvalidRequestError(f"{where} must be a block, an object with a type, not {str(block)[:80]!r}")
        match role, block.get("type"):
            case (_, "text") | ("user", "image"):
                shown.append((index, block))
            case "user", "tool_result":
                messages.append(_tool_result(block, where, gallery))
            case "assistant", "tool_use":
                name, arguments = _field(block, "name", where), _field(block, "input", where, dict)
                function = {"name": name, "arguments": arguments}
                calls.append({"id": _field(block, "id", where), "type": "function", "function": function})
            case "assistant", "thinking":
                thoughts.append(_field(block, "thinking", where))
            case "assistant", "redacted_thinking":
                pass  # encrypted: only the server that wrote it can read it
            case _, kind:
                raise _unreadable(kind, role, where)
    # Behind those of the results, as in the prompt.
    content = parts_of(shown, f"{param}.content", gallery, _BETWEEN)
    told: dict[str, Any] = {"role": role, "content": content}
    if calls:
        told |= {"tool_calls": calls, "content": told["content"] or None}
    if thoughts:
        told["reasoning_content"] = "".join(thoughts)
    if shown or role == "assistant":
        messages.append(told)


def _unreadable(kind: Any, role: str, where: str) -> InvalidRequestError:
    if kind == "image":
        return misplaced_image(where)
    return InvalidRequestError(
        f"{where}.type is {str(kind)[:80]!r}, which a message of role {role} cannot have here; this deployment reads texts and "
        "images, no documents or search results"
    )


def _blocks(content: Any, param: str) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list) and content:
        return content
    raise InvalidRequestError(f"{param}.content must be a text or a list of blocks, not {str(content)[:80]!r}")


def _tool_result(block: Mapping[str, Any], where: str, gallery: Gallery) -> dict[str, Any]:
    given = block.get("content")
    content = "" if given is None else content_of(given, f"{where}.content", gallery, _BETWEEN)
    if block.get("is_error") is True:  # chat templates have no other way to mark an error
        content = joined("Error: ", content)
    return {"role": "tool", "tool_call_id": _field(block, "tool_use_id", where), "content": content}


def _field(block: Mapping[str, Any], name: str, where: str, kind: type[Any] = str) -> Any:
    if not isinstance(value := block.get(name), kind):
        wanted = "a text" if kind is str else "an object"
        raise InvalidRequestError(f"{where}.{name} must be {wanted}, not {str(value)[:80]!r}")
    return value


@router.post("/v1/messages", responses=answers(MessageAnswer, AnthropicErrorBody), openapi_extra=REQUEST_HEADERS)
async def create_message(body: MessageBody, request: ApiRequest) -> Response:
    """Answer a conversation."""
    model = model_for(request, body.model, body.conversation)
    model.check(request.flow())
    chat, sequences = await chat_of(model, request, lambda: (body.spec(), body.chat(model)), "messages")
    is_shortened = sequences[0].sampling.max_tokens < body.max_tokens
    written = MessageFormat(f"msg_{request.internal_id}", model.name, chat.parser(), is_shortened=is_shortened)
    return await respond(request, model, sequences, written, is_stream=bool(body.stream), ignored=body.ignored())


@router.post("/v1/messages/count_tokens", responses=answers(TokenCount, AnthropicErrorBody))
async def count_tokens(body: CountBody, request: ApiRequest) -> Response:
    """How many tokens a conversation has, tools included. A worker is needed only for images."""
    model = model_for(request, body.model, body.conversation)

    def encode(text: str) -> list[int]:
        return model.encode(text, "messages", add_special_tokens=False)

    size = request.num_body_bytes
    patience = Patience(request.flow(), request.timeout_s())
    _, _, prompt = await prompt_of(model, lambda: (body.chat(model), None), encode, size, request, patience)
    return JSONResponse({"input_tokens": len(prompt.token_ids)})
