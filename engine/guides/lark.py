"""Builds grammars in llguidance's dialect of Lark from parts.

llguidance reads text in lexemes and takes the longest match of each: while a lexeme can continue, nothing else can begin. So
neighbouring regular parts become one lexeme (a terminal), which matches exactly their concatenation. A constant that begins like
JSON is cut into lexemes like JSON, so that ``{"name": …`` and a schema's ``{"x": …`` can stand side by side. See llguidance's
docs/syntax.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import llguidance

_HEAD = (
    # The model chooses its own tokens even where the text is fixed.
    '%llguidance {"no_forcing": true}\nANY: /(?s:.*)/\n'
)
_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|.)", re.DOTALL)
_JSON_LEXEMES = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]|, |: |[^\[\]{}",:]+|.', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Part:
    """An expression, or a sequence of ``pieces``. ``is_regular``: it may be part of a terminal."""

    text: str
    is_regular: bool = True
    constant: str | None = None  # the only text that it matches, if there is only one
    repeated: tuple[Part, str] | None = None  # for a repetition: the part, and the count
    # For a sequence that is not regular: its pieces; the outer ones merge with its neighbours.
    pieces: tuple[Part, ...] = ()


def constant(text: str) -> Part:
    """Exactly this text."""
    return Part(json.dumps(text, ensure_ascii=False), constant=text)


def pattern(regex: str) -> Part:
    """Text that matches the regular expression as a whole.

    The syntax is the part of JavaScript's that Rust's ``regex`` also has.
    """
    return Part(f"/{llguidance.regex_to_lark(regex, 'dw')}/".replace("\n", "\\n"))


def text_without(stops: Iterable[str]) -> Part:
    """Any text that contains none of ``stops``; special tokens are not text."""
    return Part("(ANY" + "".join(f" & ~(ANY {constant(stop).text} ANY)" for stop in stops) + ")")


def tokens(ranges: str) -> Part:
    """One token of ``ranges``, such as ``5`` or ``1-3,7``; with a leading ``^``: one of all others."""
    return Part(f"<[{ranges}]>", is_regular=False)


class Lark:
    """The rules of one grammar."""

    def __init__(self) -> None:
        self._rules: list[str] = []
        self._clients: list[dict[str, str]] = []  # clients' grammars, which have their own rules
        self._num_names = 0

    def grammar(self, root: Part) -> str:
        """The whole grammar for llguidance."""
        start = self._in_rule(root)
        text = f"{_HEAD}{''.join(self._rules)}start: {start}\n"
        return json.dumps({"grammars": [{"lark_grammar": text}, *self._clients]})

    def clients(self, text: str) -> Part:
        """A client's grammar, in Lark or in llama.cpp's EBNF (GBNF). Raises ValueError."""
        name = self._new_name()
        self._clients.append(
            {"name": name, "lark_grammar": llguidance.grammar_from("grammar", _ESCAPE.sub(_without_u, text))}
        )
        return Part(f"@{name}", is_regular=False)

    def sequence(self, parts: Iterable[Part]) -> Part:
        """One after the other."""
        given, pieces = [piece for part in parts for piece in part.pieces or (part,)], list[Part]()
        for place, part in enumerate(given[:-1]):
            if part.repeated is not None and not given[place + 1].is_regular:
                # One lexeme would also match the text that follows.
                given[place] = self._repeat_in_rule(*part.repeated)
        for is_regular, group in groupby(given, key=lambda part: part.is_regular):
            neighbours = list(group)
            pieces += [_joined(neighbours)] if is_regular else neighbours
        if len(pieces) == 1:
            return pieces[0]
        if not pieces:
            return constant("")
        return Part("", is_regular=False, pieces=tuple(pieces))

    def either(self, parts: Iterable[Part]) -> Part:
        """One of them."""
        choices = list(parts)
        if len(choices) == 1:
            return choices[0]
        if all(part.is_regular for part in choices):
            return Part("(" + " | ".join(part.text for part in choices) + ")")
        return Part("(" + " | ".join(map(self._in_rule, choices)) + ")", is_regular=False)

    def repeat(self, part: Part, least: int, most: int | None) -> Part:
        """``least`` to ``most`` times; None: without limit."""
        count = f"{{{least},{'' if most is None else most}}}"
        if part.is_regular:
            return Part(f"({part.text}){count}", repeated=(part, count))
        return self._repeat_in_rule(part, count)

    def json(self, schema: dict[str, Any]) -> Part:
        """JSON of a schema that contains llguidance's options."""
        return Part(self._rule(f"%json {json.dumps(schema)}"), is_regular=False)

    def _repeat_in_rule(self, part: Part, count: str) -> Part:
        text = self._in_rule(part)
        name = text if text.isidentifier() else self._rule(text)
        return Part(f"{name}{count}", is_regular=False)

    def _in_rule(self, part: Part) -> str:
        if part.pieces:
            return "(" + " ".join(map(self._in_rule, part.pieces)) + ")"
        if not part.is_regular:
            return part.text
        if part.constant and part.constant[0] in "{[":
            return " ".join(constant(piece).text for piece in _JSON_LEXEMES.findall(part.constant))
        return self._rule(part.text, is_terminal=True)

    def _rule(self, text: str, *, is_terminal: bool = False) -> str:
        """Add a rule and return its name."""
        name = self._new_name()
        name = name.upper() if is_terminal else name
        self._rules.append(f"{name}: {text}\n")
        return name

    def _new_name(self) -> str:
        self._num_names += 1
        return f"r{self._num_names}"


def _joined(parts: list[Part]) -> Part:
    if len(parts) == 1:
        return parts[0]
    constants = [part.constant for part in parts if part.constant is not None]
    if len(constants) == len(parts):
        return constant("".join(constants))
    return Part("(" + " ".join(part.text for part in parts) + ")")


def _without_u(escape: re.Match[str]) -> str:
    """``\\u0041`` in a form whose zeros llguidance's converter keeps."""
    code = int(escape[1] or "0", 16)
    if not code:
        return escape[0]
    return f"\\x{code:02x}" if code < 0x80 else chr(code)
