"""Calls as Llama 3.1 to 3.3 write them: an answer that is ``{"name": "f", "parameters": {"a": 1}}``, more of them after ``;``.

``<|python_tag|>`` may come in front. In the midst of text, only that begins a call.
"""

from __future__ import annotations

from kvrelay.gateway.tools.parser import Context, Syntax, read_envelope
from kvrelay.gateway.tools.reader import Reading

BEGIN = "<|python_tag|>"


def _read(context: Context, marker: str) -> Reading[bool]:
    reader = context.reader
    yield from reader.spaces()
    while True:
        if not (yield from read_envelope(context)):
            return False
        yield from context.close()
        yield from reader.spaces()
        if (yield from reader.next_is(";")):
            yield from reader.spaces()
        if (yield from reader.char()) != "{":
            return reader.is_over()


SYNTAX = Syntax((BEGIN,), _read, starts="{")
