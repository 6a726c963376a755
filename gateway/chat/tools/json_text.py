"""JSON text that comes in pieces: how far it is JSON, and where it ends.

RFC 8259, read token by token by a pushdown automaton, so that text of any depth and length costs no recursion and is read once.
Strings are accepted as they come, numbers and words once they are whole: what was streamed of a value is never wrong, at worst
unfinished.
"""

from __future__ import annotations

import re

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
