r"""Regular expressions of a JSON Schema, rewritten so that what they match can stand between the quotes of a JSON string.

A schema's pattern is about the string's value; xgrammar matches it against the text as it is written. A quote, a backslash or a
control character would end or break the string there. So a literal one becomes its escape sequence (``"`` becomes ``\"``), and
sets of characters (``.``, ``[^a]``, ``\S``) lose these characters: what is left matches the pattern too.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvrelay.engine.guide_errors import UnsupportedGuideError

SAFE_CHARACTER = r'[^\x00-\x1f"\\]'  # what may be written in a JSON string as it is
_UNSAFE = r'\x00-\x1f"\\'
_CONTROL_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_NEGATED_SETS = {"S": r"\s", "D": r"\d", "W": r"\w"}
_JSON_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\f": "\\f", "\b": "\\b"}
_HEX_LENGTHS = {"x": 2, "u": 4}


def json_string_pattern(pattern: str) -> str:
    """``pattern`` for the text of a JSON string. Raises UnsupportedGuideError naming what cannot be rewritten.

    Anchors at the ends go, since all of the string is matched; elsewhere they are an error.
    """
    scanner = _Scanner(pattern)
    parts: list[str] = []
    while (item := scanner.take()) is not None:
        if item == "^" and scanner.begins_alternative(parts):
            continue
        if item == "$" and scanner.ends_alternative():
            continue
        if item in {"^", "$"}:
            raise UnsupportedGuideError(f"pattern {_short(pattern)} has an anchor {item!r} in its midst")
        if item == ".":
            parts.append(SAFE_CHARACTER)
        elif item == "[":
            parts.append(_character_class(scanner, pattern))
        elif item[0] == "\\":
            parts.append(_escape(item, pattern))
        else:
            parts.append(_literal(item) if item in _JSON_ESCAPES or item < " " else item)
    return "".join(parts)


class _Scanner:
    """Takes a pattern apart: single characters, and escapes with all that belongs to them."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._position = 0
        self._depth = 0

    def take(self, *, in_set: bool = False) -> str | None:
        """The next item; None at the end. ``in_set``: parentheses mean nothing."""
        if self._position >= len(self._pattern):
            return None
        start = self._position
        self._position += 1
        if self._pattern[start] == "\\":
            self._position += 1 + _HEX_LENGTHS.get(self.peek(), 0) + (self.peek() == "c")
        item = self._pattern[start : self._position]
        self._depth += 0 if in_set else (item == "(") - (item == ")")
        return item

    def peek(self) -> str:
        """The next character; empty at the end."""
        return self._pattern[self._position : self._position + 1]

    def begins_alternative(self, parts: list[str]) -> bool:
        """Whether what was taken stands at the start of an outermost alternative, with ``parts`` before it."""
        return self._depth == 0 and (not parts or parts[-1] == "|")

    def ends_alternative(self) -> bool:
        """Whether what was taken stands at the end of an outermost alternative."""
        return self._depth == 0 and self.peek() in {"", "|"}


def _escape(item: str, pattern: str) -> str:
    name = item[1:2]
    if name in _NEGATED_SETS:
        return f"[^{_NEGATED_SETS[name]}{_UNSAFE}]"
    if name == "s":
        return "[ \u00a0]"
    if name in {"b", "B", "k", "p", "P"} or (name.isdigit() and name != "0"):
        raise UnsupportedGuideError(f"pattern {_short(pattern)} has {item!r}, which cannot be followed")
    if (character := _escaped_character(item)) is not None and (character in _JSON_ESCAPES or character < " "):
        return _literal(character)
    return item


def _escaped_character(item: str) -> str | None:
    """The one character that an escape stands for; None for a set of them."""
    name, rest = item[1:2], item[2:]
    if name in _HEX_LENGTHS:
        try:
            return chr(int(rest, 16))
        except ValueError as error:
            raise UnsupportedGuideError(f"{item!r} is not a character of a pattern") from error
    if name == "c":
        return chr(ord(rest or "@") % 32)
    if name in _CONTROL_ESCAPES:
        return _CONTROL_ESCAPES[name]
    return None if name in "dDwWsS" else name


def _literal(character: str) -> str:
    """The pattern of a character as JSON writes it."""
    written = _JSON_ESCAPES.get(character) or f"\\u{ord(character):04x}"
    return "(?:" + written.replace("\\", "\\\\") + ")"


def _character_class(scanner: _Scanner, pattern: str) -> str:
    """The class behind a ``[`` that was taken, without what must not stand in a JSON string."""
    is_negated = scanner.peek() == "^"
    if is_negated:
        scanner.take(in_set=True)
    items = list(_class_items(scanner, pattern))
    if is_negated:
        return f"[^{''.join(items)}{_UNSAFE}]"
    if {"\\s", "\\S"} <= set(items) or {"\\d", "\\D"} <= set(items) or {"\\w", "\\W"} <= set(items):
        return SAFE_CHARACTER
    for item in items:
        if item[1:2] in _NEGATED_SETS and item[0] == "\\":
            raise UnsupportedGuideError(f"pattern {_short(pattern)} has {item!r} among the characters of a set")
    safe = "".join(_without_unsafe(items))
    if not safe:
        raise UnsupportedGuideError(
            f"pattern {_short(pattern)} has a set of quotes, backslashes and control characters only"
        )
    return f"[{safe}]"


def _class_items(scanner: _Scanner, pattern: str) -> Iterator[str]:
    is_first = True
    while (item := scanner.take(in_set=True)) is not None:
        if item == "]" and not is_first:
            return
        if item == "]":
            raise UnsupportedGuideError(f"pattern {_short(pattern)} has an empty set of characters")
        is_first = False
        yield item
    raise UnsupportedGuideError(f"pattern {_short(pattern)} has a '[' without a ']'")


def _without_unsafe(items: list[str]) -> Iterator[str]:
    """Of a class's items those that may be written as they are; ranges are cut where they hold others."""
    index = 0
    while index < len(items):
        first = _class_character(items[index])
        if first is not None and index + 2 < len(items) and items[index + 1] == "-":
            last = _class_character(items[index + 2])
            if last is not None:
                yield from _safe_ranges(ord(first), ord(last))
                index += 3
                continue
        if first is None:
            yield " \u00a0" if items[index] == "\\s" else items[index]
        elif first >= " " and first not in '"\\':
            yield items[index]
        index += 1


def _class_character(item: str) -> str | None:
    if item == "\\b":
        return "\b"
    return item if len(item) == 1 else _escaped_character(item)


def _safe_ranges(first: int, last: int) -> Iterator[str]:
    for low, high in ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, 0x10FFFF)):
        start, end = max(first, low), min(last, high)
        if start <= end:
            yield f"{_written(start)}-{_written(end)}" if start < end else _written(start)


def _written(code: int) -> str:
    character = chr(code)
    return "\\" + character if character in "^]-[" else character


def _short(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 80 else pattern[:80] + "…")
