"""Calls as JSON envelopes, ``{"name": "f", "arguments": {"a": 1}}``: Hermes and many followers, Llama 3, Mistral.

- Hermes: ``<tool_call>\\n{…}\\n</tool_call>``, one block per call. Qwen 2.5 and 3 use the same format.
- Llama 3.1 to 3.3: an answer that is ``{"name": "f", "parameters": {…}}``; further calls follow after ``;``. ``<|python_tag|>`` may
  come first. In the middle of text, only that tag begins a call.
- Mistral: ``[TOOL_CALLS][{…}, …]``. From tokenizer version 11 on there are no envelopes: each call is
  ``[TOOL_CALLS]f[ARGS]{"a": 1}``, sometimes with ``[CALL_ID]…`` in between. Both are read, whatever the template announces.
"""

from __future__ import annotations

from kvrelay.gateway.chat.tools.parser import Context, ListEnd, Syntax, read_arguments, read_rest
from kvrelay.gateway.chat.tools.reader import Reading

BEGIN, END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def _read_hermes(context: Context, marker: str) -> Reading[bool]:
    yield from context.reader.spaces()
    is_good = yield from _read_envelope(context)
    if is_good:
        yield from context.close(END)
    return is_good


def _read_llama(context: Context, marker: str) -> Reading[bool]:
    reader = context.reader
    yield from reader.spaces()
    while True:
        if not (yield from _read_envelope(context)):
            return False
        yield from context.close()
        yield from reader.spaces()
        if (yield from reader.next_is(";")):
            yield from reader.spaces()
        if (yield from reader.char()) != "{":
            return reader.is_over()


def _read_mistral(context: Context, marker: str) -> Reading[bool]:
    reader = context.reader
    yield from reader.spaces()
    if (yield from reader.next_is("[")):
        return (yield from read_rest(context, _read_envelope)) is not ListEnd.MALFORMED
    if (yield from reader.char()) in ("{", ""):
        is_good = yield from _read_envelope(context)
    else:
        name = yield from reader.word()
        if not context.may_call(name):
            return False
        if (yield from reader.next_is(CALL_ID, ARGS)) == CALL_ID:
            yield from reader.word()
            yield from reader.next_is(ARGS)
        yield from reader.spaces()
        is_good = yield from read_arguments(reader, context.writer(name))
    if is_good:
        yield from context.close()
    return is_good


def _read_envelope(context: Context) -> Reading[bool]:
    """Read one envelope; the call stays open.

    The arguments may be called parameters, may come first, and may be missing. Other fields of the object are skipped.
    """
    reader = context.reader
    if not (yield from reader.next_is("{")):
        return False
    name: str | None = None
    held: list[str] = []  # arguments that came before the name
    has_arguments = False
    end: str | None = ","
    while end == ",":
        yield from reader.spaces()
        key = yield from reader.json_string()
        yield from reader.spaces()
        if key is None or not (yield from reader.next_is(":")):
            return False
        yield from reader.spaces()
        if key == "name" and name is None:
            name = yield from reader.json_string()
            is_good = context.may_call(name)
        elif key in ("arguments", "parameters") and not has_arguments:
            has_arguments = True
            is_good = yield from read_arguments(reader, held.append if name is None else context.writer(name))
        else:
            is_good = yield from reader.json_value(_ignore)
        if not is_good:
            return False
        yield from reader.spaces()
        end = yield from reader.next_is(",", "}")
    if end is None or name is None:
        return False
    if held or not has_arguments:
        context.writer(name)("".join(held) or "{}")
    return True


def _ignore(text: str) -> None:
    """Ignore a value that does not belong to the call."""


HERMES = Syntax((BEGIN,), _read_hermes)
LLAMA3 = Syntax((PYTHON_TAG,), _read_llama, starts="{")
MISTRAL = Syntax((TOOL_CALLS,), _read_mistral)
