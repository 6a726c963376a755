"""A chat to a prompt: the template, tools, thoughts, and what must be found in the answer's text afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvrelay.gateway.chat.dialect import Dialect
from kvrelay.gateway.chat.template import ChatTemplate
from kvrelay.gateway.chat.tools.call_grammar import guide_param
from kvrelay.gateway.chat.tools.functions import ToolChoice, ToolMode, parse_tool_choice, parse_tools
from kvrelay.gateway.chat.tools.parser import CallParser
from kvrelay.gateway.errors import InvalidRequestError
from kvrelay.gateway.relay.request import GenerationSpec


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

    def parser(self) -> CallParser:
        """Reads one choice of the answer."""
        return self._dialect.parser(self.prompt, self._choice)


def read_chat(
    template: ChatTemplate,
    dialect: Dialect,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Any] | None = None,
    tool_choice: Any = None,
    allows_parallel: bool = True,
    continues: bool = False,
    echoes: bool = False,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> Chat:
    """A conversation, whichever API it came by; messages and tools are as the client sent them.

    ``continues``: the last message is the beginning of the answer; ``echoes``: which repeats it. ``variables``: more names for the
    template. Raises InvalidRequestError naming the field that is wrong.
    """
    choice = parse_tool_choice(tool_choice, parse_tools(tools), allows_parallel=allows_parallel)
    if continues and choice.mode is not ToolMode.NONE:
        raise InvalidRequestError(
            "continue_final_message and tools are given together; leave one out", param="continue_final_message"
        )
    shown, functions = dialect.render_arguments(messages, choice)
    prompt = template.render(
        shown,
        tools=functions,
        continues=continues,
        add_generation_prompt=add_generation_prompt,
        variables=variables,
    )
    echoed = str(shown[-1].get("content") or "") if continues and echoes else ""
    return Chat(prompt, echoed, dialect, choice)
