"""Models that think before they answer: which they are, and their thoughts apart from the answer while both stream.

A family is known by the tags around its thoughts. Thoughts come first or not at all: either the answer begins with the opening
tag, or the prompt ended with it (the chat template opened it), and everything up to the closing tag is reasoning. A tag in the
midst of an answer is text. White space around thoughts belongs to the tags.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.common.sampling import Guide
from kvrelay.gateway.chat.structural_tag import format_of, free_text, guide_of, optional, regex, sequence, tag
from kvrelay.gateway.chat.tools.parser import Context
from kvrelay.gateway.chat.tools.reader import Reading


@dataclass(frozen=True, slots=True)
class ReasoningFamily:
    """How one family of models thinks."""

    name: str
    begin: str
    end: str
    mark: str = ""  # what else is in a chat template of this family

    def starts_inside(self, prompt: str) -> bool:
        """Whether the prompt, as rendered, ends within thoughts: its last words open them."""
        return prompt.rstrip().endswith(self.begin)


# In the order in which a template is held against them.
FAMILIES: tuple[ReasoningFamily, ...] = (
    ReasoningFamily("mistral", "[THINK]", "[/THINK]"),
    ReasoningFamily("seed_oss", "<seed:think>", "</seed:think>"),
    ReasoningFamily("deepseek_r1", "<think>", "</think>", "<\uff5cAssistant\uff5c>"),
    ReasoningFamily("qwen3", "<think>", "</think>"),
)


def reasoning_for(chat_template: str) -> ReasoningFamily | None:
    """The family that a chat template belongs to; None if it shows no thoughts."""
    for family in FAMILIES:
        if (family.begin in chat_template or family.end in chat_template) and family.mark in chat_template:
            return family
    return None


def reasoning_named(name: str) -> ReasoningFamily:
    """The family of that name. Raises KeyError."""
    return {family.name: family for family in FAMILIES}[name]


def after_reasoning(guide: Guide, family: ReasoningFamily, *, starts_inside: bool) -> Guide:
    """A guide for a model that may think first: thoughts are free, and ``guide`` holds from their end on.

    Where the prompt opened the thoughts they must end before the answer; elsewhere the model chooses. Raises ValueError if
    ``guide`` is not of its kind, as far as that shows without compiling it.
    """
    thoughts = tag("" if starts_inside else family.begin, free_text(), family.end)
    return guide_of(sequence(thoughts if starts_inside else optional(thoughts), regex(r"\s{0,4}"), format_of(guide)))


def read_thoughts(context: Context, family: ReasoningFamily, *, starts_inside: bool) -> Reading[None]:
    """Read the thoughts that an answer may begin with, and the white space around them."""
    reader = context.reader
    yield from reader.spaces()
    opening = yield from reader.next_is(family.begin)  # some models repeat what the prompt ended with
    if not starts_inside and not opening:
        return  # what was read stays unsettled: spaces are the answer's
    yield from reader.spaces()
    reader.settle()
    yield from reader.free((family.end,), context.out.add_reasoning)
    yield from reader.spaces()
    reader.settle()
