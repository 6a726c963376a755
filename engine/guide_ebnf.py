"""Reads grammars in GBNF, llama.cpp's EBNF: ``root ::= "a" [0-9]{2} | "(" root ")"``.

See llama.cpp's grammars/README.md. Space between the parts means nothing, line breaks included; ``#`` begins a comment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from kvrelay.engine.guide_errors import UnsupportedGuideError

LAST_CODE = 0x10FFFF
_MAX_DEPTH = 100  # of parentheses
_TOKEN = re.compile(
    r"""\s+ | \#[^\n]* | (?P<define>::=) | (?P<name>[A-Za-z_][\w.-]*) | (?P<text>"(?:[^"\\\n]|\\.)*")
    | (?P<set>\[(?:[^\]\\]|\\.)*\]) | (?P<count>\{\s*\d+\s*(?:,\s*\d*\s*)?\}) | (?P<sign>[()|*+?.])""",
    re.VERBOSE | re.ASCII,
)
_CHARACTER = re.compile(r"\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})|\\(.)|(.)", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "b": "\b", "0": "\0", "e": "\x1b"}

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Characters:
    """One character of the ranges (first and last code point), which are in order and do not overlap."""

    ranges: Ranges


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
    """What the rule of this name matches."""

    rule: str


@dataclass(frozen=True, slots=True)
class Lexeme:
    """What is read as one; not of the text, see :mod:`kvrelay.engine.guide_lexemes`."""

    body: Node


Node = Lexeme | Characters | Series | Choice | Repeat | Reference


def read_grammar(text: str) -> dict[str, Node]:
    """The rules by their names; there is a ``root``, and all that are named are there. Raises UnsupportedGuideError."""
    rules = dict(_Reader(text).rules())
    for missing in {"root", *(name for body in rules.values() for name in names_in(body))} - rules.keys():
        raise UnsupportedGuideError(f"the grammar has no rule {missing!r}")
    return rules


def names_in(node: Node) -> Iterator[str]:
    """The rules that it refers to."""
    match node:
        case Reference(rule):
            yield rule
        case Series(parts) | Choice(parts):
            for part in parts:
                yield from names_in(part)
        case Repeat(part, _, _):
            yield from names_in(part)


class _Reader:
    def __init__(self, text: str) -> None:
        self._tokens = list(_tokens(text))
        self._place = 0

    def rules(self) -> Iterator[tuple[str, Node]]:
        while self._peek() is not None:
            name = self._take("name", "a rule's name")
            self._take("define", f"'::=' behind {name!r}")
            yield name, self._choice(0)

    def _choice(self, depth: int) -> Node:
        if depth > _MAX_DEPTH:
            raise UnsupportedGuideError(f"the grammar has more than {_MAX_DEPTH} parentheses in one another")
        choices = [self._series(depth)]
        while self._peek() == ("sign", "|"):
            self._place += 1
            choices.append(self._series(depth))
        return choices[0] if len(choices) == 1 else Choice(tuple(choices))

    def _series(self, depth: int) -> Node:
        parts: list[Node] = []
        while (token := self._peek()) is not None and token not in {("sign", "|"), ("sign", ")")}:
            if self._tokens[self._place + 1 : self._place + 2] == [("define", "::=")]:
                break  # the next rule
            self._place += 1
            parts.append(self._counted(self._part(token, depth)))
        return parts[0] if len(parts) == 1 else Series(tuple(parts))

    def _part(self, token: tuple[str, str], depth: int) -> Node:
        match token:
            case "name", name:
                return Reference(name)
            case "text", text:
                return Series(tuple(Characters(((code, code),)) for code, _ in _codes(text[1:-1])))
            case "set", text:
                return _set(text)
            case "sign", ".":
                return Characters(((0, LAST_CODE),))
            case "sign", "(":
                inner = self._choice(depth + 1)
                if self._peek() != ("sign", ")"):
                    raise UnsupportedGuideError("the grammar has a '(' without its ')'")
                self._place += 1
                return inner
        raise UnsupportedGuideError(f"the grammar has {token[1]!r} where a part must stand")

    def _counted(self, part: Node) -> Node:
        while (token := self._peek()) is not None:
            match token:
                case "sign", "*":
                    part = Repeat(part, 0, None)
                case "sign", "+":
                    part = Repeat(part, 1, None)
                case "sign", "?":
                    part = Repeat(part, 0, 1)
                case "count", text:
                    least, comma, most = text.strip("{} \t\r\n").partition(",")
                    part = Repeat(part, int(least), int(most) if most.strip() else None if comma else int(least))
                    if part.most is not None and part.most < part.least:
                        raise UnsupportedGuideError(f"the grammar has {text}, which is no range")
                case _:
                    break
            self._place += 1
        return part

    def _peek(self) -> tuple[str, str] | None:
        return self._tokens[self._place] if self._place < len(self._tokens) else None

    def _take(self, kind: str, what: str) -> str:
        token = self._peek()
        if token is None or token[0] != kind:
            raise UnsupportedGuideError(
                f"the grammar has {'its end' if token is None else repr(token[1])} where {what} must stand"
            )
        self._place += 1
        return token[1]


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    place = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise UnsupportedGuideError(f"the grammar cannot be read at {text[place : place + 40]!r}")
        place = match.end()
        if match.lastgroup is not None:
            yield match.lastgroup, match[0]


def _codes(text: str) -> Iterator[tuple[int, bool]]:
    """The characters of a text or a set; true of those that were not written as they are."""
    for match in _CHARACTER.finditer(text):
        digits = match[1] or match[2] or match[3]
        code = int(digits, 16) if digits else ord(_ESCAPES.get(match[4], match[4]) if match[4] else match[5])
        is_odd = (match[4] or "").isalnum() and match[4] not in _ESCAPES
        if is_odd or code > LAST_CODE or 0xD800 <= code <= 0xDFFF:
            raise UnsupportedGuideError(f"the grammar has {match[0]!r}, which is no character")
        yield code, match[5] is None


def _set(text: str) -> Node:
    is_negated = text.startswith("[^")
    items = list(_codes(text[2 if is_negated else 1 : -1]))
    ranges: list[tuple[int, int]] = []
    while items:
        first, _ = items.pop(0)
        last = first
        if len(items) > 1 and items[0] == (ord("-"), False):
            last, _ = items[1]
            del items[:2]
        if last < first:
            raise UnsupportedGuideError(f"the grammar has {text!r}, in which a range ends before it begins")
        ranges.append((first, last))
    ranges = list(in_order(ranges))
    if is_negated:
        ends = [-1, *(last for _, last in ranges)], [*(first for first, _ in ranges), LAST_CODE + 1]
        ranges = [(last + 1, first - 1) for last, first in zip(*ends, strict=True) if last + 1 < first]
    if not ranges:
        raise UnsupportedGuideError(f"the grammar has {text!r}, a set of no characters")
    return Characters(tuple(ranges))


def in_order(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The same characters, in ranges that do not touch."""
    found: tuple[int, int] | None = None
    for first, last in sorted(ranges):
        if found is None or first > found[1] + 1:
            if found is not None:
                yield found
            found = first, last
        else:
            found = found[0], max(found[1], last)
    if found is not None:
        yield found
