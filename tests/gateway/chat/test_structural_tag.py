"""Guides of every kind inside a structural tag mean the same as alone."""

from __future__ import annotations

import pytest

from kvrelay.common.sampling import Guide, GuideKind
from kvrelay.gateway.chat.structural_tag import (
    Format,
    const,
    dispatch,
    either,
    format_of,
    free_text,
    guide_of,
    json_schema,
    optional,
    sequence,
    tag,
    tags,
)

from .tools.grammars import Grammars

CASES = {
    GuideKind.JSON_OBJECT: ("", '{"a": [1]}', "[1]"),
    GuideKind.JSON_SCHEMA: ('{"type": "integer"}', "12", "x"),
    GuideKind.REGEX: ("[ab]{2}c?", "abc", "abcd"),
    GuideKind.GRAMMAR: ('root ::= "a" root | "b"', "aab", "aa"),
    GuideKind.CHOICE: ('["yes", "no"]', "no", "maybe"),
    GuideKind.STRUCTURAL_TAG: (guide_of(const("x")).text, "x", "y"),
}


@pytest.mark.parametrize("kind", list(GuideKind))
def test_kinds(kind: GuideKind) -> None:
    grammars = Grammars()
    text, good, bad = CASES[kind]
    part = format_of(Guide(kind=kind, text=text))
    assert grammars.allows(guide_of(part), good)
    assert not grammars.allows(guide_of(part), bad)
    around = guide_of(sequence(const("<"), optional(const("!")), part, const(">")))
    assert grammars.allows(around, f"<{good}>")
    assert grammars.allows(around, f"<!{good}>")
    assert not grammars.allows(around, good)


NUMBER = json_schema({"type": "integer"})


@pytest.mark.parametrize(
    ("part", "good", "bad"),
    [
        (const("x<a>y<b>"), "x<a>y<b>", "x<a>y"),
        (optional(tag("<a>", free_text(), "\n<b>")), "<a>thought\n\n<b>", "<a>thought<b>"),
        (optional(tag("<a>", free_text(), "<b>")), "<a><b>", "<a><a><b>"),
        (tags([tag("<a>", NUMBER, "")], "<b>", is_one=False), "<a>1<b><a>2", "<a>1<a>2"),
        (dispatch("<a>", NUMBER, is_one=False), "text<a>1 more<a>2", "text<a>x"),
        (dispatch("<a>x", NUMBER, is_one=True), "text<a>x1", "text<a>1"),
        (dispatch("x<a>", NUMBER, is_one=True), "text x<a>1", "text<a>1"),
        (sequence(json_schema({"type": "string"})), '"text"', '"<a>"'),
    ],
)
def test_names_of_special_tokens_are_the_tokens(part: Format, good: str, bad: str) -> None:
    model = Grammars(["<a>", "<b>"])
    guide = guide_of(part, ["<a>", "<b>", "<other>"])
    assert model.allows(guide, good)
    assert not model.allows(guide, bad)


def test_what_is_simple_stays_simple() -> None:
    assert sequence(const(""), const("a"), const("")) == const("a")
    assert either([const("a")]) == const("a")


@pytest.mark.parametrize(("kind", "text"), [(GuideKind.JSON_SCHEMA, "{"), (GuideKind.STRUCTURAL_TAG, '{"type": "x"}')])
def test_what_is_not_of_its_kind(kind: GuideKind, text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - json's own, too
        format_of(Guide(kind=kind, text=text))
