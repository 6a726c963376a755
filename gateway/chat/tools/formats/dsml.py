"""Calls in DeepSeek's markup language (DSML): DeepSeek-V3.2 and V4, which differ in the name of the block around all calls.

``<|DSML|function_calls>\\n<|DSML|invoke name="f">\\n<|DSML|parameter name="a" string="false">1</|DSML|parameter>\\n
</|DSML|invoke>\\n</|DSML|function_calls>``, with bars that are not ASCII: U+FF5C. Each value says whether it is text, which
stands there as it is, or JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from kvrelay.gateway.chat.tools.formats.pythonic import refuse_constant
from kvrelay.gateway.chat.tools.parser import Context, Syntax
from kvrelay.gateway.chat.tools.reader import Reading

DSML = "\uff5cDSML\uff5c"  # has a token of its own
CALL, CALL_END = f'<{DSML}invoke name="', f"</{DSML}invoke>"
_NAME_END = '">'
_KEY, _VALUE_END = f'<{DSML}parameter name="', f"</{DSML}parameter>"
_KEY_END = '"'
_TEXT, _JSON = ' string="true">', ' string="false">'


@dataclass(frozen=True, slots=True)
class Block:
    """The tags around all calls of an answer. The first may be missing in an answer."""

    name: str

    @property
    def begin(self) -> str:
        """The first text of the calls."""
        return f"<{DSML}{self.name}>"

    @property
    def end(self) -> str:
        """The last text of the calls."""
        return f"</{DSML}{self.name}>"

    @property
    def syntax(self) -> Syntax:
        """The parser's syntax of a block."""
        return Syntax((self.begin, CALL), self._read)

    def _read(self, context: Context, marker: str) -> Reading[bool]:
        reader = context.reader
        mark: str | None = marker
        if marker == self.begin:
            yield from reader.spaces()
            mark = yield from reader.next_is(CALL)
        while mark == CALL:
            if not (yield from _read_call(context)):
                return False
            yield from reader.spaces()
            mark = yield from reader.next_is(CALL, self.end)
            if mark == self.end or reader.is_over():
                return True
        return False


V32 = Block("function_calls")
V4 = Block("tool_calls")


def call_begin(name: str) -> str:
    """The text before a call's arguments."""
    return f"{CALL}{name}{_NAME_END}\n"


def write_arguments(arguments: str) -> str:
    """JSON text of an object as tags."""
    return "\n".join(
        f"{_KEY}{key}{_KEY_END}{_TEXT}{value}{_VALUE_END}"
        if isinstance(value, str)
        else f"{_KEY}{key}{_KEY_END}{_JSON}{json.dumps(value, ensure_ascii=False)}{_VALUE_END}"
        for key, value in json.loads(arguments).items()
    )


def _read_call(context: Context) -> Reading[bool]:
    reader = context.reader
    name = yield from reader.word()
    if not context.may_call(name) or (yield from reader.next_is(_NAME_END)) is None:
        return False
    write = context.writer(name)
    before = "{"
    while True:
        yield from reader.spaces()
        tag = yield from reader.next_is(_KEY, CALL_END)
        if tag is None:
            return False
        if tag == CALL_END:
            break
        key = yield from reader.until(_KEY_END)
        kind = yield from reader.next_is(_TEXT, _JSON)
        value = yield from reader.until(_VALUE_END)
        if key is None or kind is None or value is None:
            return False
        written = json.dumps(value, ensure_ascii=False) if kind == _TEXT else _checked(value)
        write(f"{before}{json.dumps(key, ensure_ascii=False)}: {written}")
        before = ", "
    write("{}" if before == "{" else "}")
    yield from context.close()
    return True


def _checked(text: str) -> str:
    """The text if it is JSON, else the text as a JSON string: models forget to say that a value is text."""
    try:
        json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text.strip()
