"""Names of special tokens in a structural tag become the tokens, wherever a text of ours may stand; all else stays."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrelay.common.sampling import Guide, GuideKind
from kvrelay.gateway.dialect import Dialect
from kvrelay.gateway.structural_tag import (
    Format,
    const,
    dispatch,
    either,
    free_text,
    json_schema,
    optional,
    regex,
    sequence,
    star,
    tag,
    tags,
)
from kvrelay.gateway.token_formats import with_tokens
from kvrelay.gateway.tools.functions import ToolChoice

from .tools.cases import names_choice
from .tools.grammars import Grammars

IDS = {"<a>": 5, "<b>": 6, "<a>b": 7}
A, B, AB = ({"type": "token", "token": token_id} for token_id in (5, 6, 7))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (const("text"), const("text")),
        (const(""), const("")),
        (const("<a>"), A),
        (const("x<a>y<b>"), sequence(const("x"), A, const("y"), B)),
        (const("<a>b"), AB),
        (sequence(const("<a>"), regex("<a>")), sequence(A, regex("<a>"))),
        (optional(const("<a>")), optional(A)),
        (star(either([const("<a>"), const("x")])), star(either([A, const("x")]))),
        (tag("<a>", free_text(), "<b>"), {**tag("", free_text(), ""), "begin": A, "end": B}),
        (tag("f(", const(""), ")"), tag("f(", const(""), ")")),
        (
            tag("x<a>y", json_schema(True), "\n<b>"),
            tag("x", sequence(A, const("y"), json_schema(True), const("\n")), "") | {"end": B},
        ),
        (
            tags([tag("<a>", regex("x"), "")], ", ", is_one=False),
            tags([{**tag("", regex("x"), ""), "begin": A}], ", ", is_one=False),
        ),
        (
            tags([tag("x", regex("y"), "")], "<a>", is_one=False),
            sequence(tag("x", regex("y"), ""), star(sequence(A, tag("x", regex("y"), "")))),
        ),
        (tags([tag("x", regex("y"), "")], "<a>", is_one=True), tag("x", regex("y"), "")),
        (dispatch("x", const("<a>"), is_one=True), {**dispatch("x", A, is_one=True)}),
        (
            dispatch("<a>x", const("y"), is_one=False),
            {"type": "token_dispatch", "rules": [[5, sequence(const("x"), const("y"))]], "loop": True, "exclude_tokens": [6, 7]},
        ),
    ],
)  # fmt: skip
def test_names_become_tokens(before: Format, after: Format) -> None:
    kept = json.dumps(before)
    assert with_tokens(before, IDS) == after
    assert json.dumps(before) == kept
    assert with_tokens(before, {}) is before


@pytest.mark.parametrize(
    "odd",
    [
        {"type": "sequence", "elements": [3, None, "<a>"]},
        {"type": "triggered_tags", "triggers": ["<a>"], "tags": []},
        {"type": "dispatch", "rules": [["<a>", const("x")], ["<b>", const("y")]]},
        {"type": "tag", "begin": "<a>", "content": const("x"), "end": ["<b>"]},
        {"type": 3},
        {},
    ],
)
def test_what_clients_write_is_left_alone(odd: dict[str, Any]) -> None:
    assert with_tokens(odd, IDS) == odd


def test_a_model_whose_marks_are_special_tokens() -> None:
    model = Grammars(["[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"])
    dialect = Dialect.of("[THINK]…[/THINK] tool_calls [TOOL_CALLS][ARGS]", special_id=model.special_ids.get)
    assert dialect.special_ids == model.special_ids
    guide = dialect.guide("", names_choice("f"))
    assert guide is not None
    assert model.allows(guide, "[THINK]Should I? I should.[/THINK]\n[TOOL_CALLS]f[ARGS]{}")
    assert model.allows(guide, "An answer.")
    assert not model.allows(guide, "[TOOL_CALLS]no call")


def test_a_guide_of_the_client_alone_is_its_own() -> None:
    content = Guide(kind=GuideKind.STRUCTURAL_TAG, text='{"format": {"type": "const_string", "value": "<tool_call>"}}')
    dialect = Dialect.of("<tool_call>", special_id={"<tool_call>": 5}.get)
    assert dialect.special_ids
    assert dialect.guide("", ToolChoice(), content) is content
