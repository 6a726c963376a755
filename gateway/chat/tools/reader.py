"""Reads text that arrives in pieces as if it were whole.

A parser is a generator that reads from a :class:`Reader`. If it needs more text, it yields and continues later. So each parser
reads its format in order, and the result does not depend on how the text was cut. Text that was read but is not *settled* may still
turn out to be no call; then it becomes content.

A pushdown automaton (RFC 8259) reads JSON token by token. So text of any depth needs no recursion and is read once. Strings are
accepted piece by piece, numbers and words once they are complete. What was streamed of a value is never wrong, only unfinished.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from kvrelay.gateway.text.output import overlap

_SPACES = re.compile(r"[ \t\r\n]*")
_IN_STRING = re.compile(r'(?:[^"\\\x00-\x1f]++|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*+')
_HALF_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_LETTERS = re.compile(r"[-+.0-9a-zA-Z]*")  # the characters of numbers and words
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")


def end_of(pattern: re.Pattern[str], text: str, start: int = 0) -> int:
    """The index where a match of ``pattern`` at ``start`` ends; ``start`` if it does not match there."""
    match = pattern.match(text, start)
    return match.end() if match else start


def is_json_object(text: str) -> bool:
    """Whether ``text`` is exactly one JSON object that can be encoded as UTF-8."""
    scanner = JsonScanner()
    is_object = text.startswith("{") and scanner.push(text) == len(text) and scanner.is_complete
    return is_object and not any("\ud800" <= char <= "\udfff" for char in text)


class JsonScanner:
    """Follows one JSON value. White space before the value is part of it; white space after it is not."""

    def __init__(self) -> None:
        self._open: list[str] = []  # the brackets that are not closed yet
        self._next = "value"  # what is expected next
        self.is_complete = False  # the value has ended; a number has once another character follows
        self.is_broken = False  # the value is malformed

    def push(self, text: str, *, is_last: bool = False) -> int:
        """The number of characters of ``text`` that belong to the value. If more text follows, pass the unconsumed rest again in
        front of it.

        ``is_last``: no more text follows, so an incomplete token ends here.
        """
        at = 0
        while not self.is_complete and not self.is_broken:
            at = end_of(_IN_STRING if self._next in ("string", "name") else _SPACES, text, at)
            end = self._after_token(text, at)
            if end is None:
                return len(text) if is_last else at
            at = end
        return at

    def _after_token(self, text: str, at: int) -> int | None:  # noqa: PLR0912 - one for each kind
        """Consume the token at ``at`` and return where it ends; None if its end has not arrived."""
        if at == len(text):
            return None
        match self._next, text[at]:
            case "value" | "item or end", "{" | "[" as bracket:
                self._open.append(bracket)
                self._next = "name or end" if bracket == "{" else "item or end"
            case "value" | "item or end", '"':
                self._next = "string"
            case "colon", ":":
                self._next = "value"
            case "name or end" | "new name", '"':
                self._next = "name"
            case "name", '"':
                self._next = "colon"
            case "string", '"':
                self._end_value()
            case "comma or end", ",":
                self._next = "new name" if self._open[-1] == "{" else "value"
            case ("comma or end", "}") | ("name or end", "}") if self._open[-1] == "{":
                self._close()
            case ("comma or end", "]") | ("item or end", "]") if self._open[-1] == "[":
                self._close()
            case "value" | "item or end", _:
                end = end_of(_LETTERS, text, at)
                if end == len(text):
                    return None
                self.is_broken = _SCALAR.fullmatch(text, at, end) is None
                self._end_value()
                return at if self.is_broken else end
            case "string" | "name", "\\" if _HALF_ESCAPE.fullmatch(text, at):
                return None
            case _:
                self.is_broken = True
                return at
        return at + 1

    def _close(self) -> None:
        self._open.pop()
        self._end_value()

    def _end_value(self) -> None:
        self._next = "comma or end"
        self.is_complete = not self._open and not self.is_broken


T = TypeVar("T")
Reading = Generator[None, None, T]

NAME = re.compile(r"[a-zA-Z0-9_-]*")  # the characters of a function's name
_ANY_SPACES = re.compile(r"\s*")


class Reader:
    """The text of one answer so far. Call methods that return a ``Reading`` with ``yield from``."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0  # everything before this index was read
        self._settled = 0  # everything before this index is settled
        self.is_finished = False

    def feed(self, text: str) -> None:
        """Append text."""
        self._text = self._text[self._settled :] + text
        self._at -= self._settled
        self._settled = 0

    def finish(self) -> None:
        """End the text."""
        self.is_finished = True

    @property
    def rest(self) -> str:
        """The text that has arrived but was not read."""
        return self._text[self._at :]

    def is_over(self) -> bool:
        """Whether the text has ended and all of it was read."""
        return self.is_finished and self._at == len(self._text)

    def settle(self) -> str:
        """Settle everything read so far and return what is newly settled."""
        text = self._text[self._settled : self._at]
        self._settled = self._at
        return text

    def skip(self, length: int) -> None:
        """Read the next ``length`` characters, which must have arrived."""
        assert self._at + length <= len(self._text), "only text that came can be read"
        self._at += length

    def free(self, markers: Sequence[str], on_text: Callable[[str], None]) -> Reading[str | None]:
        """Read up to and including the first of ``markers`` and return it; None if the text ends without one.

        The text before it goes to ``on_text`` as it arrives and is settled, except for an end that may begin a marker. White space
        before a marker belongs to the marker; both stay unsettled. No marker may begin another marker.
        """
        while True:
            rest = self.rest
            found = [(place, marker) for marker in markers if (place := rest.find(marker)) >= 0]
            if found:
                place, marker = min(found)
                self._pass_on(len(rest[:place].rstrip()), on_text)
                self.skip(len(rest[:place]) - len(rest[:place].rstrip()) + len(marker))
                return marker
            if self.is_finished:
                self._pass_on(len(rest), on_text)
                return None
            held = max((overlap(rest, marker) for marker in markers), default=0)
            self._pass_on(len(rest[: len(rest) - held].rstrip() if markers else rest), on_text)
            yield

    def _pass_on(self, length: int, on_text: Callable[[str], None]) -> None:
        self.skip(length)
        text = self.settle()
        if text:
            on_text(text)

    def spaces(self) -> Reading[None]:
        """Read white space up to another character or the end."""
        while True:
            self.skip(end_of(_ANY_SPACES, self.rest))
            if self._at < len(self._text) or self.is_finished:
                return
            yield

    def next_is(self, *texts: str) -> Reading[str | None]:
        """If one of ``texts`` comes next, read and return it; otherwise read nothing and return None."""
        while True:
            rest = self.rest
            for text in texts:
                if rest.startswith(text):
                    self.skip(len(text))
                    return text
            if self.is_finished or not any(text.startswith(rest) for text in texts):
                return None
            yield

    def char(self) -> Reading[str]:
        """The next character, without reading it; empty at the end."""
        while not self.rest and not self.is_finished:
            yield
        return self.rest[:1]

    def word(self, letters: re.Pattern[str] = NAME, max_length: int = 64) -> Reading[str]:
        """Read the characters that ``letters`` match (any number of one kind), at most one more than ``max_length``."""
        while True:
            length = end_of(letters, self.rest)
            if length < len(self.rest) or length > max_length or self.is_finished:
                word = self.rest[: min(length, max_length + 1)]
                self.skip(len(word))
                return word
            yield

    def until(self, *ends: str) -> Reading[str | None]:
        """Read up to and including the first of ``ends`` and return the text before it.

        If none comes, read everything and return None.
        """
        seen = 0
        while True:
            rest = self.rest
            found = [(place, end) for end in ends if (place := rest.find(end, seen)) >= 0]
            if found:
                place, end = min(found)
                self.skip(place + len(end))
                return rest[:place]
            if self.is_finished:
                self.skip(len(rest))
                return None
            seen = max(0, len(rest) - max(len(end) for end in ends) + 1)  # searches each part of the text once
            yield

    def json_value(self, on_text: Callable[[str], None]) -> Reading[bool]:
        """Read one JSON value and pass each piece to ``on_text``.

        False if it is malformed or cut off; the rest is not read then.
        """
        scanner = JsonScanner()
        while True:
            length = scanner.push(self.rest, is_last=self.is_finished)
            if length:
                piece = self.rest[:length]
                self.skip(length)
                on_text(piece)
            if scanner.is_complete:
                return True
            if scanner.is_broken or self.is_finished:
                return False
            yield

    def json_string(self) -> Reading[str | None]:
        """Read a JSON string and return its value. None if something else comes, or if the string does not end."""
        if (yield from self.char()) != '"':
            return None
        pieces: list[str] = []
        is_whole = yield from self.json_value(pieces.append)
        return str(json.loads("".join(pieces))) if is_whole else None
