"""Calls as a JSON list behind a marker.

Granite 3 writes ``<|tool_call|>[{…}]`` or ``<tool_call>[{…}]``; Phi-4-mini writes ``functools[{…}]``, or
``<|tool_call|>[{…}]<|/tool_call|>``.
"""

from __future__ import annotations

from kvrelay.gateway.tools.parser import Context, Syntax, read_envelopes
from kvrelay.gateway.tools.reader import Reading

GRANITE_BEGINS = ("<|tool_call|>", "<tool_call>")
PHI_BEGINS = ("functools", "<|tool_call|>")
PHI_END = "<|/tool_call|>"


def _read_granite(context: Context, marker: str) -> Reading[bool]:
    return (yield from read_envelopes(context))


def _read_phi(context: Context, marker: str) -> Reading[bool]:
    reader = context.reader
    if marker == "functools" and (yield from reader.char()) != "[":
        return False  # the word, not the marker
    is_good = yield from read_envelopes(context)
    if is_good and marker != "functools":
        yield from context.close(PHI_END)
    return is_good


GRANITE = Syntax(GRANITE_BEGINS, _read_granite)
PHI = Syntax(PHI_BEGINS, _read_phi)
