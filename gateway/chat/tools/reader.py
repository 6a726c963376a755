"""Text that comes in pieces, read as if it were whole.

A parser is a generator that reads from a :class:`Reader`. If it needs more text than has come, it yields, and goes on later. So
each format is written in the order in which it is read, and the outcome does not depend on how the text was cut into pieces.

Text that was read but is not *settled* yet may still turn out to be no call; then it is content.

JSON is read token by token by a pushdown automaton (RFC 8259), so that text of any depth and length costs no recursion and is
read once. Strings are accepted as they come, numbers and words once they are whole: what was streamed of a value is never
wrong, at worst unfinished.
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
_LETTERS = re.compile(r"[-+.0-9a-zA-Z]*")  # of numbers and words
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")


def end_of(pattern: re.Pattern[str], text: str, start: int = 0) -> int:
    """Where ``pattern``, which begins at ``start``, ends; ``start`` if it does not match there."""
    match = pattern.match(text, start)
    return match.end() if match else start


def is_json_object(text: str) -> bool:
    """Whether ``text`` is one JSON object that any encoding can carry, and nothing else."""
    scanner = JsonScanner()
    is_object = text.startswith("{") and scanner.push(text) == len(text) and scanner.is_complete
    return is_object and not any("\ud800" <= char <= "\udfff" for char in text)


class JsonScanner:
    """Follows one JSON value. Spaces around the value are not part of it, except those in front of it."""

    def __init__(self) -> None:
        self._open: list[str] = []  # the brackets that are not closed yet
        self._next = "value"  # what comes
        self.is_complete = False  # the value is over; a number is, once something else has come
        self.is_broken = False  # it is malformed

    def push(self, text: str, *, is_last: bool = False) -> int:
        """How many of ``text``'s characters belong to the value. More must come with what is left of them, if more is to come.

        ``is_last``: no more will, so half a token is what there is of the value.
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
        """Where the token at ``at`` ends, which is taken in; None if its end has not come."""
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

NAME = re.compile(r"[a-zA-Z0-9_-]*")  # what a function's name is made of
_ANY_SPACES = re.compile(r"\s*")


class Reader:
    """The text of one answer, as far as it came. Methods that return a ``Reading`` are called with ``yield from``."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0  # what comes before was read …
        self._settled = 0  # … and before this it is settled
        self.is_finished = False

    def feed(self, text: str) -> None:
        """More text came."""
        self._text = self._text[self._settled :] + text
        self._at -= self._settled
        self._settled = 0

    def finish(self) -> None:
        """No more will come."""
        self.is_finished = True

    @property
    def rest(self) -> str:
        """What came and was not read."""
        return self._text[self._at :]

    def is_over(self) -> bool:
        """Whether all was read that will ever come."""
        return self.is_finished and self._at == len(self._text)

    def settle(self) -> str:
        """What was read since the last time, for good."""
        text = self._text[self._settled : self._at]
        self._settled = self._at
        return text

    def skip(self, length: int) -> None:
        """Read the next ``length`` characters, which have come."""
        assert self._at + length <= len(self._text), "only text that came can be read"
        self._at += length

    def free(self, markers: Sequence[str], on_text: Callable[[str], None]) -> Reading[str | None]:
        """Read up to and with the first of ``markers`` and return it; None if the text ends without one.

        The text in front goes to ``on_text`` as it comes and is settled, all but what may be the beginning of a marker. Spaces in
        front of a marker belong to it: they stay unsettled, as the marker does. No marker may begin another.
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
        """Read white space, up to what is none or to the end."""
        while True:
            self.skip(end_of(_ANY_SPACES, self.rest))
            if self._at < len(self._text) or self.is_finished:
                return
            yield

    def next_is(self, *texts: str) -> Reading[str | None]:
        """Read whichever of ``texts`` comes next and return it; None, and nothing is read, if none of them does."""
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
        """The next character, which is not read by this; empty at the end."""
        while not self.rest and not self.is_finished:
            yield
        return self.rest[:1]

    def word(self, letters: re.Pattern[str] = NAME, max_length: int = 64) -> Reading[str]:
        """Read what ``letters`` match (any number of one kind): all that come, but at most one more than ``max_length``."""
        while True:
            length = end_of(letters, self.rest)
            if length < len(self.rest) or length > max_length or self.is_finished:
                word = self.rest[: min(length, max_length + 1)]
                self.skip(len(word))
                return word
            yield

    def until(self, *ends: str) -> Reading[str | None]:
        """Read up to and with the first of ``ends``; returns the text in front of it, or None if none comes (all is read then)."""
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
            seen = max(0, len(rest) - max(len(end) for end in ends) + 1)  # text is searched once
            yield

    def json_value(self, on_text: Callable[[str], None]) -> Reading[bool]:
        """Read one JSON value, each piece of it to ``on_text``; False where it is malformed or cut off (the rest is not read)."""
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
        """Read a JSON string; returns what it says. None if something else comes, or if it does not end."""
        if (yield from self.char()) != '"':
            return None
        pieces: list[str] = []
        is_whole = yield from self.json_value(pieces.append)
        return str(json.loads("".join(pieces))) if is_whole else None
