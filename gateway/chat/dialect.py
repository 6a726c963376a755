"""How a model talks: what of its template, its tools and its thoughts the gateway must know to ask it and to read its answers.

One :class:`Dialect` per model, made from its chat template and two settings. For a chat request, in this order:
``parse_tools`` and ``parse_tool_choice`` (:mod:`.tools.functions`), :meth:`Dialect.render_arguments` in front of the chat template,
:meth:`Dialect.guide` into the sampling parameters, and for each choice of the answer :meth:`Dialect.parser`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvrelay.common.sampling import Guide
from kvrelay.gateway.chat import reasoning as thoughts
from kvrelay.gateway.chat.reasoning import (
    ReasoningFamily,
    after_reasoning,
    read_thoughts,
    reasoning_for,
    reasoning_named,
)
from kvrelay.gateway.chat.structural_tag import format_of, guide_of
from kvrelay.gateway.chat.tools.calls import CallIds, OutputParser, PlainParser, random_call_id
from kvrelay.gateway.chat.tools.families import FAMILIES
from kvrelay.gateway.chat.tools.functions import ToolChoice, ToolMode
from kvrelay.gateway.chat.tools.guides import tool_guide
from kvrelay.gateway.chat.tools.messages import Message, MessageStyle, template_messages
from kvrelay.gateway.chat.tools.parser import NO_CALLS, CallParser
from kvrelay.gateway.chat.tools.support import ToolSupport
from kvrelay.gateway.errors import InvalidRequestError

# Values of --tool-parser and --reasoning-parser.
TOOL_PARSERS: tuple[str, ...] = ("auto", "none", *sorted(family.name for family in FAMILIES))
REASONING_PARSERS: tuple[str, ...] = ("auto", "none", *sorted(family.name for family in thoughts.FAMILIES))


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one model is asked and read. Immutable."""

    tools: ToolSupport | None
    reasoning: ReasoningFamily | None
    style: MessageStyle

    @classmethod
    def of(
        cls,
        chat_template: str | None,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> Dialect:
        """From the source of a chat template (None: the model has none) and the settings of these names."""
        template = chat_template or ""
        named = None if reasoning_parser in ("auto", "none") else reasoning_named(reasoning_parser)
        return cls(
            tools=ToolSupport.of(template, tool_parser),
            reasoning=reasoning_for(template) if reasoning_parser == "auto" else named,
            style=MessageStyle.of(template),
        )

    @property
    def kept_tokens(self) -> tuple[str, ...]:
        """Special tokens that must stay in the text of chat answers: parsers read them."""
        of_tools = () if self.tools is None else self.tools.family.kept_tokens
        of_reasoning = () if self.reasoning is None else (self.reasoning.begin, self.reasoning.end)
        return tuple(dict.fromkeys((*of_tools, *of_reasoning)))

    def render_arguments(
        self, messages: Sequence[Mapping[str, Any]], choice: ToolChoice
    ) -> tuple[list[Message], list[dict[str, Any]] | None]:
        """(messages, tools) for the chat template. Raises InvalidRequestError: malformed calls, or tools that are switched off."""
        if self.tools is not None:
            return self.tools.render_arguments(messages, choice)
        if choice.shown:
            raise InvalidRequestError(
                "this deployment has tools switched off (--tool-parser none); leave tools out", param="tools"
            )
        return template_messages(messages, self.style), None

    def guide(
        self, prompt: str, choice: ToolChoice, content: Guide | None = None, param: str | None = None
    ) -> Guide | None:
        """What the answer to ``prompt``, as rendered, must look like; None if it may be anything.

        ``content``: what the text of the answer must match, as the client's field ``param`` asks (by default ``response_format``);
        it does not bind calls and thoughts. Raises InvalidRequestError if it cannot be combined with them.
        """
        reasoning = self.reasoning
        try:
            guide = content
            if self.tools is not None and self._reads_calls(choice):
                guide = tool_guide(self.tools.family, self.tools.choice_for(choice), content)
            # Otherwise nobody asked, nobody thinks, or the template has ended the thoughts.
            if guide is not None and reasoning is not None and not prompt.rstrip().endswith(reasoning.end):
                guide = after_reasoning(guide, reasoning, starts_inside=reasoning.starts_inside(prompt))
            return guide if guide is None or guide is content else guide_of(format_of(guide), self.kept_tokens)
        except (ValueError, RecursionError) as error:
            param = param or "response_format"
            raise InvalidRequestError(f"{param} cannot be used: {error}", param=param.partition(".")[0]) from error

    def parser(self, prompt: str, choice: ToolChoice, new_id: CallIds = random_call_id) -> OutputParser:
        """Reads one answer to ``prompt``, as rendered."""
        if self.is_plain(choice):
            return PlainParser()
        syntax, read_first = NO_CALLS, None
        if self.tools is not None and self._reads_calls(choice):
            syntax, choice = self.tools.family.syntax, self.tools.choice_for(choice)
        if (family := self.reasoning) is not None:
            read_first = partial(read_thoughts, family=family, starts_inside=family.starts_inside(prompt))
        return CallParser(syntax, choice, new_id, read_first)

    def is_plain(self, choice: ToolChoice) -> bool:
        """Whether all of an answer's text is content: there are neither tools nor thoughts."""
        return self.reasoning is None and not self._reads_calls(choice)

    def _reads_calls(self, choice: ToolChoice) -> bool:
        """Whether the model's family of tools has to do with the answer."""
        has_format = self.tools is not None and self.tools.family.whole_answer is not None
        return has_format or (self.tools is not None and choice.mode is not ToolMode.NONE)
