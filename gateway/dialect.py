"""How a model talks: what of its template, its tools and its thoughts the gateway must know to ask it and to read its answers.

One :class:`Dialect` per model, made from its chat template and two settings. For a chat request, in this order:
``parse_tools`` and ``parse_tool_choice`` (:mod:`.tools.functions`), :meth:`Dialect.render_arguments` in front of the chat template,
:meth:`Dialect.guide` into the sampling parameters, and for each choice of the answer :meth:`Dialect.parser`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvrelay.common.sampling import Guide
from kvrelay.gateway import reasoning as thoughts
from kvrelay.gateway.errors import InvalidRequestError
from kvrelay.gateway.reasoning import ReasoningFamily, ReasoningParser, after_reasoning, reasoning_for, reasoning_named
from kvrelay.gateway.tools.calls import CallIds, OutputParser, PlainParser, random_call_id
from kvrelay.gateway.tools.families import FAMILIES
from kvrelay.gateway.tools.functions import ToolChoice, ToolMode
from kvrelay.gateway.tools.guides import tool_guide
from kvrelay.gateway.tools.messages import Message, MessageStyle, template_messages
from kvrelay.gateway.tools.parser import CallParser
from kvrelay.gateway.tools.support import ToolSupport

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
    def of(cls, chat_template: str | None, tool_parser: str = "auto", reasoning_parser: str = "auto") -> Dialect:
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
        of_reasoning = () if self.reasoning is None else self.reasoning.kept_tokens
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

    def guide(self, prompt: str, choice: ToolChoice, content: Guide | None = None) -> Guide | None:
        """What the answer to ``prompt``, as rendered, must look like; None if it may be anything.

        ``content``: what the text of the answer must match (``response_format``); it does not bind calls and thoughts. Raises
        InvalidRequestError if it cannot be combined with them.
        """
        reasoning = self.reasoning
        try:
            guide = content
            if self.tools is not None and choice.mode is not ToolMode.NONE:
                guide = tool_guide(self.tools.family, self.tools.choice_for(choice), content)
            if guide is None or reasoning is None or prompt.rstrip().endswith(reasoning.end):
                return guide  # nobody asked, nobody thinks, or the template has ended the thoughts
            return after_reasoning(guide, reasoning, starts_inside=reasoning.starts_inside(prompt))
        except ValueError as error:
            raise InvalidRequestError(f"response_format cannot be used: {error}", param="response_format") from error

    def parser(self, prompt: str, choice: ToolChoice, new_id: CallIds = random_call_id) -> OutputParser:
        """Reads one answer to ``prompt``, as rendered."""
        answer: OutputParser = PlainParser()
        if self.tools is not None and choice.mode is not ToolMode.NONE:
            answer = CallParser(self.tools.family.syntax, self.tools.choice_for(choice), new_id)
        if self.reasoning is None:
            return answer
        return ReasoningParser(self.reasoning, answer, starts_inside=self.reasoning.starts_inside(prompt))
