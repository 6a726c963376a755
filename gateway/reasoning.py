"""Models that think before they answer: which they are, and their thoughts apart from the answer while both stream.

A family is known by the tags around its thoughts. Thoughts come first or not at all: either the answer begins with the opening
tag, or the prompt ended with it (the chat template opened it), and everything up to the closing tag is reasoning. A tag in the
midst of an answer is text. White space around thoughts belongs to the tags.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.common.sampling import Guide
from kvrelay.gateway.structural_tag import format_of, free_text, guide_of, optional, regex, sequence, tag
from kvrelay.gateway.tools.calls import OutputParser, ParsedDelta, Thought
from kvrelay.gateway.tools.reader import Reader, Reading


@dataclass(frozen=True, slots=True)
class ReasoningFamily:
    """How one family of models thinks."""

    name: str
    begin: str
    end: str
    marks: tuple[str, ...]  # a chat template that has one of them is of this family
    kept_tokens: tuple[str, ...]  # special tokens that the text must keep: the parser reads them

    def starts_inside(self, prompt: str) -> bool:
        """Whether the prompt, as rendered, ends within thoughts: its last words open them."""
        return prompt.rstrip().endswith(self.begin)


def _family(name: str, begin: str, end: str, *marks: str) -> ReasoningFamily:
    return ReasoningFamily(name, begin, end, marks, (begin, end))


# In the order in which a template is held against them.
FAMILIES: tuple[ReasoningFamily, ...] = (
    _family("mistral", "[THINK]", "[/THINK]", "[THINK]"),
    _family("seed_oss", "<seed:think>", "</seed:think>", "<seed:think>"),
    _family("deepseek_r1", "<think>", "</think>", "<\uff5cAssistant\uff5c>"),
    _family("qwen3", "<think>", "</think>", "<think>", "</think>"),
)


def reasoning_for(chat_template: str) -> ReasoningFamily | None:
    """The family that a chat template belongs to; None if it shows no thoughts."""
    for family in FAMILIES:
        has_tags = family.begin in chat_template or family.end in chat_template
        if has_tags and any(mark in chat_template for mark in family.marks):
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


class ReasoningParser:
    """Keeps thoughts apart; ``answer`` reads what comes after them. Implements :class:`.tools.calls.OutputParser`."""

    def __init__(self, family: ReasoningFamily, answer: OutputParser, *, starts_inside: bool) -> None:
        self._family = family
        self._answer = answer
        self._starts_inside = starts_inside
        self._reader = Reader()
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._steps = self._parse()

    def push(self, text: str) -> ParsedDelta:
        """Take new text in; returns all that is certain."""
        self._reader.feed(text)
        next(self._steps, None)
        return self._take()

    def finish(self) -> ParsedDelta:
        """The text is over: what was held back."""
        self._reader.finish()
        next(self._steps, None)
        return self._take() + self._answer.finish()

    def _parse(self) -> Reading[None]:
        reader, family = self._reader, self._family
        yield from reader.spaces()
        opening = yield from reader.next_is(family.begin)  # some models repeat what the prompt ended with
        if self._starts_inside or opening:
            yield from reader.spaces()
            reader.settle()
            end = yield from reader.free((family.end,), self._reasoning.append)
            if end is None:
                return
            yield from reader.spaces()
            reader.settle()
        self._content.append(reader.settle())  # spaces at the beginning of an answer without thoughts
        yield from reader.free((), self._content.append)

    def _take(self) -> ParsedDelta:
        reasoning, content = "".join(self._reasoning), "".join(self._content)
        self._reasoning.clear()
        self._content.clear()
        thoughts = ParsedDelta((Thought(reasoning),)) if reasoning else ParsedDelta()
        return thoughts + self._answer.push(content) if content else thoughts
