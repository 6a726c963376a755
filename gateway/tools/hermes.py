"""Calls as Hermes writes them, and Qwen 2.5 and 3 and many others after it.

``<tool_call>\\n{"name": "f", "arguments": {"a": 1}}\\n</tool_call>``, one block per call.
"""

from __future__ import annotations

from kvrelay.gateway.tools.parser import Context, Syntax, read_envelope
from kvrelay.gateway.tools.reader import Reading

BEGIN, END = "<tool_call>", "</tool_call>"


def _read(context: Context, marker: str) -> Reading[bool]:
    yield from context.reader.spaces()
    is_good = yield from read_envelope(context)
    if is_good:
        yield from context.close(END)
    return is_good


SYNTAX = Syntax((BEGIN,), _read)
