"""The part of xgrammar's structural tags (JSON format of version 0.2) that guides here use.

A structural tag describes text by nested formats: constants, JSON of a schema, free text, sequences and choices. ``dispatch`` is
free text in which certain strings must be followed by certain formats. The gateway only writes structural tags; workers compile
them. See https://xgrammar.mlc.ai/docs for the meaning of each format.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, assert_never

from kvrelay.common.sampling import Guide, GuideKind

Format = dict[str, Any]

# JSON allows any white space between tokens. A model that must write JSON without knowing what can write spaces forever.
# This bound
# leaves room for indentation.
MAX_SPACES = 16


def const(text: str) -> Format:
    """Exactly this text."""
    return {"type": "const_string", "value": text}


def sequence(*formats: Format) -> Format:
    """One after the other; empty constants are left out."""
    elements = [part for part in formats if part != const("")]
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}


def either(formats: Sequence[Format]) -> Format:
    """One of them."""
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": list(formats)}


def optional(content: Format) -> Format:
    """This, or nothing."""
    return {"type": "optional", "content": content}


def star(content: Format) -> Format:
    """This, any number of times."""
    return {"type": "star", "content": content}


def regex(pattern: str) -> Format:
    """Text that matches ``pattern`` as a whole."""
    return {"type": "regex", "pattern": pattern}


def json_schema(schema: Any, style: str = "json") -> Format:
    """JSON of a schema (an object or a truth value); ``style`` selects another notation for it."""
    return {"type": "json_schema", "json_schema": schema, "style": style, "max_whitespace_cnt": MAX_SPACES}


def tag(begin: str, content: Format, end: str) -> Format:
    """``content`` between two texts. Free text as content goes up to the first ``end``."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def tags(items: Sequence[Format], separator: str, *, is_one: bool) -> Format:
    """At least one of these tags, with ``separator`` between them; exactly one if ``is_one``."""
    return {
        "type": "tags_with_separator",
        "tags": list(items),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": is_one,
    }


def free_text() -> Format:
    """Any text."""
    return {"type": "any_text"}


def dispatch(trigger: str, content: Format, *, is_one: bool) -> Format:
    """Free text in which every ``trigger`` is followed by ``content``; if ``is_one``, the text ends after the first."""
    return {"type": "dispatch", "rules": [[trigger, content]], "loop": not is_one}


def guide_of(part: Format, special_tokens: Sequence[str] = ()) -> Guide:
    """A guide for the whole output.

    Texts of the format that name ``special_tokens`` stand for those tokens, if the model has them.
    """
    tag = {"type": "structural_tag", "format": part, "special_tokens": special_tokens}
    text = json.dumps(tag, ensure_ascii=False, separators=(",", ":"))
    return Guide(kind=GuideKind.STRUCTURAL_TAG, text=text)


def format_of(guide: Guide) -> Format:
    """A guide as a part of a structural tag.

    Raises ValueError if its text is malformed, as far as that can be seen without compiling it.
    """
    match guide.kind:
        case GuideKind.JSON_OBJECT:
            return json_schema({"type": "object"})
        case GuideKind.JSON_SCHEMA:
            return json_schema(json.loads(guide.text))
        case GuideKind.REGEX:
            return regex(guide.text)
        case GuideKind.GRAMMAR:
            return {"type": "grammar", "grammar": guide.text}
        case GuideKind.CHOICE:
            return either([const(text) for text in json.loads(guide.text)])
        case GuideKind.STRUCTURAL_TAG:
            part = json.loads(guide.text)
            if not isinstance(part, dict) or not isinstance(part.get("format"), dict):
                raise ValueError('a structural tag is {"type": "structural_tag", "format": {…}}')
            return dict(part["format"])
        case _:
            assert_never(guide.kind)
