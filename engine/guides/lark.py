"""Grammars in llguidance's dialect of Lark, built from parts.

llguidance reads text in lexemes and takes the longest match of each: where a lexeme can go on, nothing else begins. So neighbours
that are regular become one lexeme (a terminal), which matches exactly what they do. A constant that begins as JSON does is cut into
lexemes as JSON is, so that ``{"name": …`` and a schema's ``{"x": …`` can stand side by side. See llguidance's docs/syntax.md.
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
    '%llguidance {"no_forcing": true}\nANY: /(?s:.*)/\n'  # the model chooses its tokens, also where the text is given
)
_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|.)", re.DOTALL)
_JSON_LEXEMES = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]|, |: |[^\[\]{}",:]+|.', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Part:
    """An expression, or a sequence of ``pieces``. ``is_regular``: it may stand in a terminal."""

    text: str
    is_regular: bool = True
    constant: str | None = None  # the only text that it matches
    repeated: tuple[Part, str] | None = None  # of a repeated part: once, and how often
    pieces: tuple[Part, ...] = ()  # of a sequence that is not regular, whose ends merge with its neighbours


def constant(text: str) -> Part:
    """Exactly this text."""
    return Part(json.dumps(text, ensure_ascii=False), constant=text)


def pattern(regex: str) -> Part:
    """What matches the regular expression as a whole: of JavaScript's syntax what Rust's crate ``regex`` has, too."""
    return Part(f"/{llguidance.regex_to_lark(regex, 'dw')}/".replace("\n", "\\n"))


def text_without(stops: Iterable[str]) -> Part:
    """Any text in which none of these comes; special tokens are no text."""
    return Part("(ANY" + "".join(f" & ~(ANY {constant(stop).text} ANY)" for stop in stops) + ")")


def tokens(ranges: str) -> Part:
    """One token of these, as ``5`` or ``1-3,7``; of all others with a ``^`` in front."""
    return Part(f"<[{ranges}]>", is_regular=False)


class Lark:
    """The rules of one grammar."""

    def __init__(self) -> None:
        self._rules: list[str] = []
        self._clients: list[dict[str, str]] = []  # grammars with rules of their own
        self._num_names = 0

    def grammar(self, root: Part) -> str:
        """The whole, for llguidance."""
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
                # As one lexeme it would take what follows for its own.
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
        """``least`` to ``most`` times; None: without end."""
        count = f"{{{least},{'' if most is None else most}}}"
        if part.is_regular:
            return Part(f"({part.text}){count}", repeated=(part, count))
        return self._repeat_in_rule(part, count)

    def json(self, schema: dict[str, Any]) -> Part:
        """JSON of a schema, with llguidance's options in it."""
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
        """The name of a new rule."""
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
    """``\\u0041`` in a shape whose zeros llguidance's converter does not lose."""
    code = int(escape[1] or "0", 16)
    if not code:
        return escape[0]
    return f"\\x{code:02x}" if code < 0x80 else chr(code)
