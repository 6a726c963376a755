"""JSON text that comes in pieces: how far it is JSON, and where it ends.

RFC 8259, read character by character by a pushdown automaton, so that text of any depth and length costs no recursion and is read
once. All that is accepted can be continued to valid JSON: what was streamed of a value is never wrong, at worst unfinished.
"""

from __future__ import annotations

import enum
import re


class _State(enum.Enum):
    """What may come next."""

    VALUE = enum.auto()
    ITEM_OR_END = enum.auto()  # after [
    KEY_OR_END = enum.auto()  # after {
    KEY = enum.auto()  # after a comma in an object
    COLON = enum.auto()
    NEXT = enum.auto()  # after a value within an object or array: a comma or the end
    STRING = enum.auto()
    ESCAPE = enum.auto()  # after a backslash
    HEX = enum.auto()
    NUMBER = enum.auto()
    WORD = enum.auto()  # true, false, null
    DONE = enum.auto()


_BETWEEN = frozenset({_State.VALUE, _State.ITEM_OR_END, _State.KEY_OR_END, _State.KEY, _State.COLON, _State.NEXT})
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SPACES = re.compile(r"[ \t\r\n]*")
_DIGITS = dict.fromkeys("123456789", "whole") | {"0": "zero"}
_ALL_DIGITS = "0123456789"
# The parts of a number, and which part each character leads to.
_NUMBER: dict[str, dict[str, str]] = {
    "minus": _DIGITS,
    "zero": {".": "point", "e": "e", "E": "e"},
    "whole": dict.fromkeys(_ALL_DIGITS, "whole") | {".": "point", "e": "e", "E": "e"},
    "point": dict.fromkeys(_ALL_DIGITS, "fraction"),
    "fraction": dict.fromkeys(_ALL_DIGITS, "fraction") | {"e": "e", "E": "e"},
    "e": dict.fromkeys(_ALL_DIGITS, "exponent") | {"+": "sign", "-": "sign"},
    "sign": dict.fromkeys(_ALL_DIGITS, "exponent"),
    "exponent": dict.fromkeys(_ALL_DIGITS, "exponent"),
}
_NUMBER_ENDS = frozenset({"zero", "whole", "fraction", "exponent"})
_WORDS = {"t": "rue", "f": "alse", "n": "ull"}


def end_of(pattern: re.Pattern[str], text: str, start: int = 0) -> int:
    """Where ``pattern``, which begins at ``start``, ends; ``start`` if it does not match there."""
    match = pattern.match(text, start)
    return match.end() if match else start


def is_json_object(text: str) -> bool:
    """Whether ``text`` is one JSON object that any encoding can carry, and nothing else."""
    scanner = JsonScanner()
    return text.startswith("{") and scanner.push(text) == len(text) and scanner.is_complete and _is_encodable(text)


def _is_encodable(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


class JsonScanner:
    """Follows one JSON value. Spaces around the value are not part of it, except those in front of it."""

    def __init__(self) -> None:
        self._state = _State.VALUE
        self._open: list[str] = []  # the brackets that are not closed yet
        self._is_key = False  # whether the string that is read is one
        self._hex_left = 0
        self._number = ""  # the part of the number that is read
        self._word_left = ""

    @property
    def is_complete(self) -> bool:
        """Whether the value is over. A number is, once something else has come."""
        return self._state is _State.DONE

    def push(self, text: str) -> int:
        """How many of ``text``'s characters belong to the value. If not all do: the value is over, or malformed there."""
        at = 0
        while at < len(text):
            if self._state in _BETWEEN:
                at = end_of(_SPACES, text, at)
            elif self._state is _State.STRING:
                at = end_of(_PLAIN, text, at)
            if at == len(text) or not self._takes(text[at]):
                break
            at += 1
        return at

    def _takes(self, char: str) -> bool:
        match self._state:
            case _State.STRING:
                return self._takes_of_string(char)
            case _State.ESCAPE | _State.HEX:
                return self._takes_of_escape(char)
            case _State.NUMBER:
                return self._takes_of_number(char)
            case _State.WORD:
                return self._takes_of_word(char)
            case _:
                return self._takes_between(char)

    def _takes_of_string(self, char: str) -> bool:
        if char == "\\":
            self._state = _State.ESCAPE
        elif char == '"' and self._is_key:
            self._state = _State.COLON
        elif char == '"':
            self._end_value()
        return char in '\\"'  # all else in a string was skipped, but for control characters

    def _takes_of_escape(self, char: str) -> bool:
        if self._state is _State.ESCAPE:
            self._hex_left = 4 if char == "u" else 0
            is_right = char in '"\\/bfnrtu'
        else:
            self._hex_left -= 1
            is_right = char in "0123456789abcdefABCDEF"
        self._state = _State.HEX if self._hex_left else _State.STRING
        return is_right

    def _takes_of_number(self, char: str) -> bool:
        part = _NUMBER[self._number].get(char)
        if part is not None:
            self._number = part
            return True
        if self._number not in _NUMBER_ENDS:
            return False
        self._end_value()
        return bool(self._open) and (char in " \t\r\n" or self._takes_between(char))

    def _takes_of_word(self, char: str) -> bool:
        is_right, self._word_left = char == self._word_left[0], self._word_left[1:]
        if is_right and not self._word_left:
            self._end_value()
        return is_right

    def _takes_between(self, char: str) -> bool:
        state = self._state
        if state is _State.COLON and char == ":":
            self._state = _State.VALUE
        elif state is _State.NEXT and char == ",":
            self._state = _State.KEY if self._open[-1] == "{" else _State.VALUE
        elif (state, char) in {(_State.KEY_OR_END, "}"), (_State.ITEM_OR_END, "]")} or (
            state is _State.NEXT and self._open[-1] + char in {"{}", "[]"}
        ):
            self._open.pop()
            self._end_value()
        elif state in {_State.KEY, _State.KEY_OR_END}:
            self._state, self._is_key = _State.STRING, True
            return char == '"'
        elif state in {_State.VALUE, _State.ITEM_OR_END}:
            return self._begins_value(char)
        else:
            return False
        return True

    def _begins_value(self, char: str) -> bool:
        if char in "{[":
            self._open.append(char)
            self._state = _State.KEY_OR_END if char == "{" else _State.ITEM_OR_END
        elif char == '"':
            self._state, self._is_key = _State.STRING, False
        elif char == "-" or char in _DIGITS:
            self._state, self._number = _State.NUMBER, _DIGITS.get(char, "minus")
        elif char in _WORDS:
            self._state, self._word_left = _State.WORD, _WORDS[char]
        else:
            return False
        return True

    def _end_value(self) -> None:
        self._state = _State.NEXT if self._open else _State.DONE
