"""Every kind of guide can be a part of a structural tag, and means the same there."""

from __future__ import annotations

import pytest

from kvrelay.common.sampling import Guide, GuideKind
from kvrelay.gateway.structural_tag import const, either, format_of, guide_of, optional, sequence

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


def test_what_is_simple_stays_simple() -> None:
    assert sequence(const(""), const("a"), const("")) == const("a")
    assert either([const("a")]) == const("a")


@pytest.mark.parametrize(("kind", "text"), [(GuideKind.JSON_SCHEMA, "{"), (GuideKind.STRUCTURAL_TAG, '{"type": "x"}')])
def test_what_is_not_of_its_kind(kind: GuideKind, text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - json's own, too
        format_of(Guide(kind=kind, text=text))
