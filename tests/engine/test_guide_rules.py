"""Grammars as xgrammar serializes them, read back."""

from __future__ import annotations

import json
import random

import pytest
import xgrammar as xgr

from kvrelay.engine.guide_rules import (
    Characters,
    Choice,
    Node,
    Reference,
    Repeat,
    Rules,
    Series,
    Text,
    UnknownGrammarError,
    read_rules,
)

A, B = Text(b"a"), Text(b"b")


def rules_of(grammar: str) -> Rules:
    return read_rules(xgr.Grammar.from_ebnf(grammar).serialize_json())


def plain(node: Node) -> Node:
    """Without choices of one part and series of one part, which xgrammar puts around everything."""
    if isinstance(node, Series | Choice):
        parts = tuple(plain(part) for part in node.parts)
        return parts[0] if len(parts) == 1 else type(node)(parts)
    return node


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('"a"', A),
        ('""', Text(b"")),
        ('"aé\\0b"', Text("aé\0b".encode())),
        ('"a" "b"', Series((A, B))),
        ('"" | "a" root', Choice((Text(b""), Series((A, Reference(0)))))),
        ("other{2,5}", Repeat(Reference(1), 2, 5)),
        ("other{3,}", Repeat(Reference(1), 3, None)),
        ("[a-b]*", Repeat(Characters(((97, 98),)), 0, None)),
        ("[é]", Text("é".encode())),
        ("[😀]", Text("😀".encode())),
        (r"[\]\-^é]", Characters(((45, 45), (93, 94), (233, 233)))),
        (r"[b-da-cx\n]", Characters(((10, 10), (97, 100), (120, 120)))),
        (r"[^b-\U0010fffe\0-\x1f]", Characters(((32, 97), (0x10FFFF, 0x10FFFF)))),
    ],
)
def test_a_rule(body: str, expected: Node) -> None:
    rules = rules_of(f'root ::= {body}\nother ::= "b"')
    assert plain(rules.bodies[rules.root]) == expected
    assert plain(rules.bodies[1]) == B


def test_regular_expressions_are_grammars() -> None:
    rules = read_rules(xgr.Grammar.from_regex("a[0-9]{2}").serialize_json())
    assert plain(rules.bodies[rules.root]) == Series((A, Repeat(Reference(1), 2, 2)))
    assert plain(rules.bodies[1]) == Characters(((48, 57),))


def test_every_character_is_read_as_it_was_meant() -> None:
    generator = random.Random(1)
    codes = [
        *range(0x250),
        *(generator.choice((0x800, 0xE000, 0x10_0000)) + generator.randrange(0x700) for _ in range(400)),
    ]
    for start in range(0, len(codes), 50):
        some = codes[start : start + 50]
        escapes = "".join(f"\\U{code:08x}" for code in some)
        assert plain(rules_of(f'root ::= "{escapes}"').bodies[0]) == Text("".join(map(chr, some)).encode())
        characters = plain(rules_of(f"root ::= [{escapes}]").bodies[0])
        assert isinstance(characters, Characters)
        assert {code for low, high in characters.ranges for code in range(low, high + 1)} == set(some)


def test_lookahead_is_not_read() -> None:
    with pytest.raises(UnknownGrammarError, match="more than a body"):
        rules_of('root ::= "a" other\nother ::= "b" (="c")')


def test_what_grammars_of_schemas_and_tags_have_is_not_read() -> None:
    schema = xgr.Grammar.from_json_schema('{"type": "string", "pattern": "^a+$"}')
    with pytest.raises(UnknownGrammarError):
        read_rules(schema.serialize_json())
    tags = {
        "type": "triggered_tags",
        "triggers": ["<"],
        "tags": [{"begin": "<a>", "content": {"type": "any_text"}, "end": ">"}],
    }
    with pytest.raises(UnknownGrammarError):
        read_rules(
            xgr.Grammar.from_structural_tag(json.dumps({"type": "structural_tag", "format": tags})).serialize_json()
        )


@pytest.mark.parametrize("changes", [{"__VERSION__": "v17"}, {"optimized": True}, {"grammar_expr_data": [5, 1, 3]}])
def test_another_format_is_not_read(changes: dict[str, object]) -> None:
    grammar = json.loads(xgr.Grammar.from_regex("a").serialize_json())
    if "grammar_expr_data" in changes:
        changes = {**changes, "grammar_expr_indptr": [0]}
    with pytest.raises(UnknownGrammarError):
        read_rules(json.dumps(grammar | changes))
