"""Turns a chat into a prompt, and says what to look for in the answer's text: tool calls and reasoning.

A :class:`Dialect` describes how one model talks; it is made from the model's chat template and two settings. :func:`read_chat`
makes a :class:`Chat` of a conversation in three steps: ``parse_tools`` and ``parse_tool_choice`` (:mod:`.tools.functions`) read the
tools, :meth:`Dialect.render_arguments` adapts the messages, and the chat template renders them. Then :meth:`Dialect.guide` goes
into the sampling parameters, and :meth:`Dialect.parser` reads each choice of the answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from kvrelay.common.sampling import Guide
from kvrelay.gateway.chat.images import ChatImage, ImageLink
from kvrelay.gateway.chat.structural_tag import format_of, free_text, guide_of, optional, regex, sequence, tag
from kvrelay.gateway.chat.template import ChatTemplate
from kvrelay.gateway.chat.tools.call_grammar import guide_param, tool_guide
from kvrelay.gateway.chat.tools.calls import CallIds, random_call_id
from kvrelay.gateway.chat.tools.formats.families import FALLBACK, FAMILIES, ToolFamily, family_for
from kvrelay.gateway.chat.tools.functions import ToolChoice, ToolMode, parse_tool_choice, parse_tools
from kvrelay.gateway.chat.tools.messages import Message, MessageStyle, as_text, template_messages, with_tools
from kvrelay.gateway.chat.tools.parser import NO_CALLS, CallParser, Context
from kvrelay.gateway.chat.tools.reader import Reading
from kvrelay.gateway.errors import ChatTemplateError, InvalidRequestError
from kvrelay.gateway.relay.request import GenerationSpec


@dataclass(frozen=True, slots=True)
class ReasoningFamily:
    """How one family of models marks its reasoning ("thoughts"): the tags around it.

    Thoughts come first or not at all. Either the answer begins with the opening tag, or the chat template already opened the
    thoughts in the prompt. Everything up to the closing tag is reasoning. A tag in the middle of an answer is text. White space
    around thoughts belongs to the tags.
    """

    begin: str
    end: str
    mark: str = ""  # a further text in every chat template of this family

    def starts_inside(self, prompt: str) -> bool:
        """Whether the rendered prompt ends inside thoughts that it has opened."""
        return prompt.rstrip().endswith(self.begin)


# A template is compared with the families in this order.
REASONING_FAMILIES: dict[str, ReasoningFamily] = {
    "mistral": ReasoningFamily("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningFamily("<seed:think>", "</seed:think>"),
    "deepseek_r1": ReasoningFamily("<think>", "</think>", "<\uff5cAssistant\uff5c>"),
    "qwen3": ReasoningFamily("<think>", "</think>"),
}
# Matches the variable ``tools``, not a message's field of that name.
_TOOLS = re.compile(r"(?<![\w.\"'])tools\b(?!['\"])")

# Texts in templates that allow only one call per answer: Llama 3's, and gpt-oss's.
_SINGLE_CALL = ("only supports single tool", "max 1 tool call per message")


def reasoning_for(chat_template: str) -> ReasoningFamily | None:
    """The family that a chat template belongs to; None if it shows no thoughts."""
    for family in REASONING_FAMILIES.values():
        if (family.begin in chat_template or family.end in chat_template) and family.mark in chat_template:
            return family
    return None


def after_reasoning(guide: Guide, family: ReasoningFamily, *, starts_inside: bool) -> Guide:
    """A guide for a model that may think first: thoughts are free text, and ``guide`` applies after them.

    If the prompt opened the thoughts, they must end before the answer. Otherwise the model chooses whether to think. Raises
    ValueError if ``guide`` is malformed, as far as that can be seen without compiling it.
    """
    thoughts = tag("" if starts_inside else family.begin, free_text(), family.end)
    return guide_of(sequence(thoughts if starts_inside else optional(thoughts), regex(r"\s{0,4}"), format_of(guide)))


def read_thoughts(context: Context, family: ReasoningFamily, *, starts_inside: bool) -> Reading[None]:
    """Read the thoughts that an answer may begin with, and the white space around them."""
    reader = context.reader
    yield from reader.spaces()
    opening = yield from reader.next_is(family.begin)  # some models repeat what the prompt ended with
    if not starts_inside and not opening:
        return  # the spaces stay unsettled: they belong to the answer
    yield from reader.spaces()
    reader.settle()
    yield from reader.free((family.end,), context.out.add_reasoning)
    yield from reader.spaces()
    reader.settle()


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one model is prompted and its answers are read. Immutable."""

    family: ToolFamily | None  # how it calls functions; None: tools are switched off
    reasoning: ReasoningFamily | None
    style: MessageStyle
    describes_tools: bool  # the template shows the model its tools
    tells_calls: bool  # the template shows earlier calls and their results; otherwise text describes them
    has_system: bool  # the template takes system messages
    takes_parallel: bool  # the template takes several calls of one answer
    parsers: tuple[str, str]  # the settings tool_parser and reasoning_parser

    @classmethod
    def of(cls, chat_template: str | None, tool_parser: str = "auto", reasoning_parser: str = "auto") -> Dialect:
        """A dialect from a chat template's source (None: the model has none) and the settings of these names.

        A template of no known family does not get tools either: the model would answer in a format that no parser reads. Raises
        KeyError on an unknown name.
        """
        template = chat_template or ""
        known = family_for(template) if tool_parser in ("auto", "none") else FAMILIES[tool_parser]
        named = None if reasoning_parser in ("auto", "none") else REASONING_FAMILIES[reasoning_parser]
        return cls(
            family=None if tool_parser == "none" else known or FALLBACK,
            reasoning=reasoning_for(template) if reasoning_parser == "auto" else named,
            style=MessageStyle.of(template),
            describes_tools=known is not None and _TOOLS.search(template) is not None,
            tells_calls=known is not None and "tool_calls" in template,
            has_system="System role not supported" not in template,
            takes_parallel=not any(mark in template for mark in _SINGLE_CALL),
            parsers=(tool_parser, reasoning_parser),
        )

    @property
    def kept_tokens(self) -> tuple[str, ...]:
        """Special tokens that must stay in the text of chat answers because parsers read them."""
        of_tools = () if self.family is None else self.family.kept_tokens
        of_reasoning = () if self.reasoning is None else (self.reasoning.begin, self.reasoning.end)
        return tuple(dict.fromkeys((*of_tools, *of_reasoning)))

    def choice_for(self, choice: ToolChoice) -> ToolChoice:
        """The choice, adapted to this model: one call per answer if the template cannot show several."""
        return choice if self.takes_parallel else msgspec.structs.replace(choice, allows_parallel=False)

    def render_arguments(
        self, messages: Sequence[Mapping[str, Any]], choice: ToolChoice
    ) -> tuple[list[Message], list[dict[str, Any]] | None]:
        """(messages, tools) for the chat template. Raises InvalidRequestError for malformed calls, or if tools are switched off.

        A template that describes no tools gets None, and messages that describe them in words.
        """
        if self.family is None:
            if choice.shown:
                raise InvalidRequestError(
                    "this deployment has tools switched off (--tool-parser none); leave tools out", param="tools"
                )
            return template_messages(messages, self.style), None
        style = self.style if self.tells_calls else replace(self.style, has_text_arguments=True)
        told = template_messages(messages, style)
        if not self.tells_calls:
            told = as_text(told, self.family.spelling)
        if not choice.shown:
            return told, None
        if self.describes_tools:
            return told, [function.as_tool() for function in choice.shown]
        return with_tools(told, choice.shown, self.family.spelling, has_system=self.has_system), None

    def guide(
        self, prompt: str, choice: ToolChoice, content: Guide | None = None, param: str | None = None
    ) -> Guide | None:
        """The guide for the answer to the rendered ``prompt``; None if the answer is free.

        ``content``: the guide for the text of the answer, from the client's field ``param`` (by default ``response_format``). It
        does not apply to calls and thoughts. Raises InvalidRequestError if it cannot be combined with them.
        """
        reasoning = self.reasoning
        try:
            guide = content
            if self.family is not None and self._reads_calls(choice):
                guide = tool_guide(self.family, self.choice_for(choice), content)
            # In the other cases there is no guide, the model does not think, or the template has closed the thoughts.
            if guide is not None and reasoning is not None and not prompt.rstrip().endswith(reasoning.end):
                guide = after_reasoning(guide, reasoning, starts_inside=reasoning.starts_inside(prompt))
            return guide if guide is None or guide is content else guide_of(format_of(guide), self.kept_tokens)
        except (ValueError, RecursionError) as error:
            param = param or "response_format"
            raise InvalidRequestError(f"{param} cannot be used: {error}", param=param.partition(".")[0]) from error

    def parser(
        self, prompt: str, choice: ToolChoice, new_id: CallIds = random_call_id, *, is_json: bool = False
    ) -> CallParser:
        """A parser for one answer to the rendered ``prompt``. ``is_json``: an answer without calls must be JSON."""
        syntax, read_first = NO_CALLS, None
        if self.family is not None and self._reads_calls(choice):
            syntax, choice = self.family.syntax, self.choice_for(choice)
            is_json = is_json and self.family.whole_answer is None  # otherwise the format says where calls begin
        if (family := self.reasoning) is not None:
            read_first = partial(read_thoughts, family=family, starts_inside=family.starts_inside(prompt))
        return CallParser(syntax, choice, new_id, read_first, is_json=is_json)

    def is_plain(self, choice: ToolChoice) -> bool:
        """Whether all of an answer's text is content: there are neither tools nor thoughts."""
        return self.reasoning is None and not self._reads_calls(choice)

    def _reads_calls(self, choice: ToolChoice) -> bool:
        """Whether the tool family's parser reads the answer."""
        if self.family is None:
            return False
        return self.family.whole_answer is not None or choice.mode is not ToolMode.NONE


@dataclass(frozen=True, slots=True)
class Chat:
    """A rendered chat, ready to generate."""

    prompt: str
    continues: bool  # the answer goes on with the last message
    echoed: str  # the part of the last message that the answer repeats
    _dialect: Dialect
    _choice: ToolChoice
    images: Sequence[ChatImage | ImageLink] = ()  # in the order of their marks in the prompt
    given: Mapping[str, Any] = field(default_factory=dict, repr=False)  # the client's fields that the template has seen
    refusal: ChatTemplateError | None = (
        None  # of the template, which refused messages with images; the prompt is empty then
    )
    is_json: bool = False  # an answer without calls must be JSON

    def guided(self, spec: GenerationSpec) -> GenerationSpec:
        """``spec`` for this chat's answer, with the guide for tools and thoughts.

        Raises InvalidRequestError if that contradicts the guide of ``spec``.
        """
        guide = self._dialect.guide(self.prompt, self._choice, spec.guide, spec.guide_param)
        if spec.beam_search is not None and guide is not None:
            raise InvalidRequestError("tools and use_beam_search are given together; leave one out", param="tools")
        kept_tokens = () if self.has_plain_answers else self._dialect.kept_tokens  # no parser would read them
        param = guide_param(self._choice, spec.guide_param)
        return msgspec.structs.replace(
            spec,
            guide=guide,
            guide_param=param,
            image_params=tuple(image.param for image in self.images),
            kept_tokens=kept_tokens,
            continues_text=self.continues,
        )

    @property
    def has_plain_answers(self) -> bool:
        """Whether all text is content: there are neither tools nor thoughts."""
        return self._dialect.is_plain(self._choice)

    def parser(self) -> CallParser:
        """A parser for one choice of the answer."""
        return self._dialect.parser(self.prompt, self._choice, is_json=self.is_json)


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
    images: Sequence[ChatImage | ImageLink] = (),
    given: Mapping[str, Any] | None = None,
) -> Chat:
    """Make a chat of a conversation from any API. ``messages`` and ``tools`` are as the client sent them.

    ``continues``: the last message is the beginning of the answer. ``echoes``: the answer repeats that message. ``variables``:
    further names for the template. ``images``: for each part ``{"type": "image"}`` of the messages. ``given``: the client's own
    fields, for errors that name one. Raises InvalidRequestError naming the wrong field.

    If tools are shown, the model's own template for them is used if it has one, as in transformers.
    """
    choice = parse_tool_choice(tool_choice, parse_tools(tools), allows_parallel=allows_parallel)
    if continues and choice.mode is not ToolMode.NONE:
        raise InvalidRequestError(
            "continue_final_message and tools are given together; leave one out", param="continue_final_message"
        )
    if choice.shown and template.with_tools is not None:
        own = Dialect.of(template.with_tools.source, *dialect.parsers)
        if own.describes_tools:  # otherwise its format is unknown, and the other template shows tools in words
            template, dialect = template.with_tools, own
    shown, functions = dialect.render_arguments(messages, choice)
    refusal = None
    try:
        prompt = template.render(
            shown,
            tools=functions,
            continues=continues,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
        )
    except ChatTemplateError as error:
        if not images:
            raise
        # Most likely the model reads text only. Its workers say so, and more clearly.
        prompt, refusal = "", error
    echoed = str(shown[-1].get("content") or "") if continues and echoes else ""
    return Chat(prompt, continues, echoed, dialect, choice, images, given or {}, refusal)
