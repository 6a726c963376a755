"""What a model can do with tools: its family, and what its chat template does and does not do for it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from kvrelay.gateway.chat.tools.families import FALLBACK, ToolFamily, family_for, family_named
from kvrelay.gateway.chat.tools.functions import ToolChoice
from kvrelay.gateway.chat.tools.messages import Message, MessageStyle, template_messages
from kvrelay.gateway.chat.tools.prompts import as_text, with_tools

# The variable, not a message's field of that name.
_TOOLS = re.compile(r"(?<![\w.\"'])tools\b(?!['\"])")

# What templates say that know one call of an answer: Llama 3's, and gpt-oss's.
_SINGLE_CALL = ("only supports single tool", "max 1 tool call per message")


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """How tools are told to a model, and how its answers are read. Immutable; one per model."""

    family: ToolFamily
    style: MessageStyle
    describes_tools: bool  # the template shows the model its tools …
    tells_calls: bool  # … and what came of earlier calls; what it does not do is done with text
    has_system: bool  # it takes system messages
    takes_parallel: bool  # it takes several calls of one answer

    @classmethod
    def of(cls, chat_template: str, parser: str = "auto") -> ToolSupport | None:
        """For a model with this template. ``parser``: a family's name, ``auto`` or ``none`` (then None).

        A template that belongs to no family that is known is not asked to show tools either: the model would answer in a format
        that nobody reads. Raises KeyError on an unknown name.
        """
        if parser == "none":
            return None
        family = family_for(chat_template) if parser == "auto" else family_named(parser)
        return cls(
            family=family or FALLBACK,
            style=MessageStyle.of(chat_template),
            describes_tools=family is not None and _TOOLS.search(chat_template) is not None,
            tells_calls=family is not None and "tool_calls" in chat_template,
            has_system="System role not supported" not in chat_template,
            takes_parallel=not any(mark in chat_template for mark in _SINGLE_CALL),
        )

    def choice_for(self, choice: ToolChoice) -> ToolChoice:
        """The choice as this model can carry it out: one call at a time if its template could not tell of more."""
        return choice if self.takes_parallel else msgspec.structs.replace(choice, allows_parallel=False)

    def render_arguments(
        self, messages: Sequence[Mapping[str, Any]], choice: ToolChoice
    ) -> tuple[list[Message], list[dict[str, Any]] | None]:
        """(messages, tools) for the chat template. Raises InvalidRequestError that names a malformed call.

        A template that describes no tools gets None, and messages that do it in words.
        """
        style = self.style if self.tells_calls else replace(self.style, has_text_arguments=True)
        told = template_messages(messages, style)
        if not self.tells_calls:
            told = as_text(told, self.family.spelling)
        if not choice.shown:
            return told, None
        if self.describes_tools:
            return told, [function.as_tool() for function in choice.shown]
        return with_tools(told, choice.shown, self.family.spelling, has_system=self.has_system), None
