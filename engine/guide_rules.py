"""Reads grammars as xgrammar serializes them into trees that an automaton can be built from.

Regular expressions come this way too: xgrammar turns them into a grammar, so what they mean is its business alone. What only some
grammars have (lookahead, tokens by number, tags, captures) is not read, nor is another version's format: those are xgrammar's to
follow. (What it prints cannot be read instead: a zero byte, for one, ends a string there.)
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import xgrammar as xgr

_VERSION = "v16"
_LAST_CODE = 0x10FFFF
_NO_LOOKAHEAD = -1
_PLAIN_RULE = [False, -1, -1, "", False, None]  # behind name, body and lookahead: no capture, and none of the rest
_UNSAFE = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))  # characters that do not stand in a JSON string as they are


class _Kind(enum.IntEnum):
    """Of the parts, by xgrammar's numbers."""

    TEXT = 0
    CHARACTERS = 1
    CHARACTERS_STAR = 2
    NOTHING = 3
    REFERENCE = 4
    SERIES = 5
    CHOICE = 6
    REPEAT = 8
    PATTERN = 12


@dataclass(frozen=True, slots=True)
class Text:
    """These bytes."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Characters:
    """One character of the ranges (first and last code point), which are in order and do not overlap."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Series:
    """One part behind the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the parts."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """The part, ``least`` to ``most`` times; None: without end."""

    part: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Reference:
    """What a rule matches."""

    rule: int


Node = Text | Characters | Series | Choice | Repeat | Reference


@dataclass(frozen=True, slots=True)
class Rules:
    """A grammar. References are places in ``bodies``."""

    bodies: tuple[Node, ...]
    root: int
    most_counted: int = 0  # the highest count of a Repeat


class UnknownGrammarError(Exception):
    """A grammar has something that is not read here."""


def read_rules(serialized: str, *, is_of_schema: bool = False) -> Rules:
    """The rules of a grammar that was not optimized, from its ``serialize_json()``. Raises UnknownGrammarError.

    ``is_of_schema``: xgrammar made it of a JSON Schema. Lookahead, which it adds itself there, only says what follows anyway.
    """
    reader = _Reader(is_of_schema=is_of_schema)
    root = reader.read(serialized, in_string=False)
    return Rules(tuple(reader.bodies), root, reader.most_counted)


class _Reader:
    """Collects the rules of a grammar and of the patterns in it."""

    def __init__(self, *, is_of_schema: bool) -> None:
        self._is_of_schema = is_of_schema
        self.bodies: list[Node] = []
        self.most_counted = 0

    def read(self, serialized: str, *, in_string: bool) -> int:
        """Add the rules; returns the root's place. ``in_string``: see :func:`_characters`."""
        grammar: dict[str, Any] = json.loads(serialized)
        if grammar.get("__VERSION__") != _VERSION or grammar["optimized"] or grammar["suffix_stop_infos"]:
            raise UnknownGrammarError(f"the format is {grammar.get('__VERSION__')}, not {_VERSION}, or it is optimized")
        first = len(self.bodies)
        self.bodies += [Text(b"")] * len(grammar["rules"])
        data, starts = grammar["grammar_expr_data"], grammar["grammar_expr_indptr"]
        nodes: list[Node] = []
        for start, end in zip(starts, [*starts[1:], len(data)], strict=True):
            kind, _, *values = data[start:end]
            nodes.append(self._node(kind, values, nodes, first, in_string=in_string))
        for place, (name, body, lookahead, *rest) in enumerate(grammar["rules"]):
            if rest != _PLAIN_RULE or (lookahead != _NO_LOOKAHEAD and not self._is_of_schema):
                raise UnknownGrammarError(f"rule {name} has more than a body")
            self.bodies[first + place] = nodes[body]
        root: int = grammar["root_rule_id"]
        return first + root

    def _node(self, kind: int, values: list[int], before: Seq[Node], first: int, *, in_string: bool) -> Node:
        """``before``: the nodes that it may be made of. ``first``: the place of the grammar's first rule."""
        node: Node
        match kind:
            case _Kind.TEXT:
                node = Text(_unsigned(values))
            case _Kind.CHARACTERS:
                node = _characters(values, in_string=in_string)
            case _Kind.CHARACTERS_STAR:
                node = Repeat(_characters(values, in_string=in_string), 0, None)
            case _Kind.NOTHING:
                node = Text(b"")
            case _Kind.REFERENCE:
                node = Reference(first + values[0])
            case _Kind.SERIES | _Kind.CHOICE if all(value < len(before) for value in values):
                parts = tuple(before[value] for value in values)
                node = Series(parts) if kind == _Kind.SERIES else Choice(parts)
            case _Kind.REPEAT:
                rule, least, most = values
                self.most_counted = max(self.most_counted, least, most)
                node = Repeat(Reference(first + rule), least, None if most < 0 else most)
            case _Kind.PATTERN if not in_string:
                is_json, *text = values
                grammar = xgr.Grammar.from_regex(_unsigned(text).decode())
                node = Reference(self.read(grammar.serialize_json(), in_string=bool(is_json)))
            case _:
                raise UnknownGrammarError(f"parts of kind {kind} made of {values[:8]} are not known")
        return node


def _characters(values: list[int], *, in_string: bool) -> Characters:
    """``in_string``: of a JSON string's pattern. All characters but some are only those that stand there as they are, then."""
    is_negated, *codes = values
    ranges = _in_order(zip(codes[::2], codes[1::2], strict=True))
    if is_negated:
        ranges = _others(ranges)
    if in_string and (is_negated or ranges == [(0, _LAST_CODE)]):
        ranges = _others(_in_order([*_others(ranges), *_UNSAFE]))
    return Characters(tuple(ranges))


def _in_order(given: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for first, last in sorted(given):
        if ranges and first <= ranges[-1][1] + 1:
            ranges[-1] = ranges[-1][0], max(ranges[-1][1], last)
        else:
            ranges.append((first, last))
    return ranges


def _others(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """All characters that are not in the ``ranges``, which are in order."""
    others: list[tuple[int, int]] = []
    next_code = 0
    for first, last in [*ranges, (_LAST_CODE + 1, _LAST_CODE + 1)]:
        if next_code < first:
            others.append((next_code, first - 1))
        next_code = last + 1
    return others


def _unsigned(values: Seq[int]) -> bytes:
    # Of a class of a single character the bytes come as signed numbers.
    return bytes(value & 0xFF for value in values)
