"""A chat to a prompt: the template, tools, thoughts, and what must be found in the answer's text afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvrelay.gateway.chat.dialect import Dialect
from kvrelay.gateway.chat.template import ChatTemplate
from kvrelay.gateway.chat.tools.calls import OutputParser
from kvrelay.gateway.chat.tools.functions import ToolChoice, ToolMode, parse_tool_choice, parse_tools
from kvrelay.gateway.chat.tools.guides import guide_param
from kvrelay.gateway.errors import InvalidRequestError
from kvrelay.gateway.text.spec import GenerationSpec


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation and how to go on with it, whichever API it came by. Messages and tools are as the client sent them."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None = None
    tool_choice: Any = None
    allows_parallel: bool = True
    continues: bool = False  # the last message is the beginning of the answer
    echoes: bool = False  # and is repeated in it
    add_generation_prompt: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)  # more names for the template


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat, ready to be computed."""

    prompt: str
    echoed: str  # of the last message, what the answer begins with
    _dialect: Dialect
    _choice: ToolChoice

    def guided(self, spec: GenerationSpec) -> GenerationSpec:
        """``spec`` with what tools and thoughts ask of the output. Raises InvalidRequestError if that contradicts its guide."""
        guide = self._dialect.guide(self.prompt, self._choice, spec.guide, spec.guide_param)
        if spec.beam_search is not None and guide is not None:
            raise InvalidRequestError("tools and use_beam_search are given together; leave one out", param="tools")
        kept_tokens = () if self.has_plain_answers else self._dialect.kept_tokens  # nobody would read them
        param = guide_param(self._choice, spec.guide_param)
        return msgspec.structs.replace(spec, guide=guide, guide_param=param, kept_tokens=kept_tokens)

    @property
    def has_plain_answers(self) -> bool:
        """Whether all text is content: there are neither tools nor thoughts."""
        return self._dialect.is_plain(self._choice)

    def parser(self) -> OutputParser:
        """Reads one choice of the answer."""
        return self._dialect.parser(self.prompt, self._choice)


class ChatReader:
    """Knows the model's template, and how it calls functions and thinks."""

    def __init__(self, template: ChatTemplate, dialect: Dialect) -> None:
        self._template = template
        self._dialect = dialect

    def read(self, request: ChatRequest) -> Chat:
        """Raises InvalidRequestError naming the field that is wrong."""
        functions = parse_tools(request.tools)
        choice = parse_tool_choice(request.tool_choice, functions, allows_parallel=request.allows_parallel)
        if request.continues and choice.mode is not ToolMode.NONE:
            raise InvalidRequestError(
                "continue_final_message and tools are given together; leave one out", param="continue_final_message"
            )
        messages, tools = self._dialect.render_arguments(request.messages, choice)
        prompt = self._template.render(
            messages,
            tools=tools,
            continues=request.continues,
            add_generation_prompt=request.add_generation_prompt,
            variables=request.variables,
        )
        echoed = str(messages[-1].get("content") or "") if request.continues and request.echoes else ""
        return Chat(prompt, echoed, self._dialect, choice)
