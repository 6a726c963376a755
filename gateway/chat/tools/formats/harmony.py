"""Answers in OpenAI's harmony format, as gpt-oss writes them: messages in channels for thoughts, for calls and for the user.

``<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}
<|call|>``, or at the end ``<|start|>assistant<|channel|>final<|message|>…``. The prompt ends with ``<|start|>assistant``. The
recipient may also stand before the channel. A message in the commentary channel without a recipient is for the user.

The whole answer consists of messages. So it is read the same way with or without tools, and a guide covers the whole answer.
``<|call|>`` and ``<|return|>`` are among the model's end tokens, so they are usually not part of the text. See OpenAI's cookbook,
"OpenAI harmony response format".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvrelay.gateway.chat.structural_tag import Format, const, either, free_text, optional, sequence, star, tag
from kvrelay.gateway.chat.tools.parser import Context, Syntax, read_arguments
from kvrelay.gateway.chat.tools.reader import Reader, Reading

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
TOKENS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
SPEAKER = "assistant"
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"

_TO, _PREFIX = "to=", "functions."
_WORD = re.compile(r"[^\s<]*")
_MAX_WORD_LENGTH = 96
_MAX_WORDS = 8  # words of a header: a channel, the recipient, the content's type
_JSON = (f" {CONSTRAIN}json", f"{CONSTRAIN}json", " json")  # the spellings of the content's type


@dataclass(frozen=True, slots=True)
class _Header:
    """The header before a message's content."""

    channel: str
    recipient: str  # empty: the user


def _read(context: Context, marker: str) -> Reading[bool]:
    reader, out = context.reader, context.out
    begin: str | None = marker
    while begin in ("", START, CHANNEL):
        header = yield from _read_header(reader, begin)
        if header is None:
            return False
        if header.recipient:
            return (yield from _read_call(context, header.recipient))
        on_text: Callable[[str], None] = out.add_reasoning if header.channel == ANALYSIS else out.add_content
        reader.settle()
        # A message without an end marker ends where the next one begins.
        begin = yield from reader.free((END, CALL, RETURN, START, CHANNEL), on_text)
    return True


def _read_header(reader: Reader, begin: str) -> Reading[_Header | None]:
    """Read up to and including ``<|message|>``; None if this is no header of the assistant."""
    channel, recipient, previous = "", "", begin
    for index in range(_MAX_WORDS):
        yield from reader.spaces()
        if index or begin != CHANNEL:
            previous = (yield from reader.next_is(CHANNEL, CONSTRAIN, MESSAGE)) or ""
        if previous == MESSAGE:
            return _Header(channel, recipient) if channel in (ANALYSIS, COMMENTARY, FINAL) else None
        word = yield from reader.word(_WORD, _MAX_WORD_LENGTH)
        if not word or (not index and begin == START and word != SPEAKER):
            return None
        if previous == CHANNEL:
            channel = word
        elif word.startswith(_TO):
            recipient = word.removeprefix(_TO)
        elif not index and not begin:
            return None  # the text only begins like a header
    return None


def _read_call(context: Context, recipient: str) -> Reading[bool]:
    reader = context.reader
    name = recipient.removeprefix(_PREFIX)
    if not context.may_call(name):
        return False
    yield from reader.spaces()
    is_good = yield from read_arguments(reader, context.writer(name))
    if is_good:
        yield from context.close(CALL, END, RETURN)
    return is_good


def answer(calls: Sequence[tuple[str, Format]], content: Format | None) -> Format:
    """The format of a whole answer: thoughts and remarks, then one of ``calls`` (name, format of the arguments), or text for the
    user.

    ``content``: the format of that text. None: there must be a call.
    """
    thought = tag(f"{CHANNEL}{ANALYSIS}{MESSAGE}", free_text(), END)
    remark = tag(f"{CHANNEL}{COMMENTARY}{MESSAGE}", free_text(), END)
    ends = [_call(name, arguments) for name, arguments in calls]
    if content is not None:
        typed = optional(either([const(text) for text in _JSON]))
        ends.append(sequence(const(f"{CHANNEL}{FINAL}"), typed, const(MESSAGE), content))
    return sequence(star(sequence(either([thought, remark]), const(f"{START}{SPEAKER}"))), either(ends))


def _call(name: str, arguments: Format) -> Format:
    heads = [const(f"{CHANNEL}{COMMENTARY} {_TO}{_PREFIX}{name}"), const(f" {_TO}{_PREFIX}{name}{CHANNEL}{COMMENTARY}")]
    return sequence(either(heads), either([const(text) for text in _JSON]), const(MESSAGE), arguments)


def call_begin(name: str) -> str:
    """The beginning of a call, up to its arguments."""
    return f"{CHANNEL}{COMMENTARY} {_TO}{_PREFIX}{name}{_JSON[0]}{MESSAGE}"


SYNTAX = Syntax((START, CHANNEL), _read, starts="t")
