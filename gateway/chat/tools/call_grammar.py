"""Guides that make malformed calls impossible: from the tool choice to a grammar of the whole answer.

- ``required`` or a named function: the answer is calls (or the one call) from its first token on.
- ``auto``: free text, and what begins a call goes on as one. So it is for every family whose calls begin with a marker of their
  own; a family without one (an answer that begins with ``{`` may be meant for the reader) is guided only if a function is
  ``strict``, and then an answer that begins as a call is one.
- A family whose answers have a format of their own as a whole (``ToolFamily.whole_answer``) is guided from the first token on.
- Arguments: ``strict`` functions follow their schema; with ``"strict": false`` they are any object. Without ``strict``, they follow
  the schema if a call was required, and as much of it as always compiles under ``auto``: there, a schema that no grammar can
  be made of must not fail a request that can be answered with text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvrelay.common.sampling import Guide
from kvrelay.gateway.chat.structural_tag import (
    Format,
    const,
    dispatch,
    either,
    format_of,
    free_text,
    guide_of,
    regex,
    sequence,
    tag,
    tags,
)
from kvrelay.gateway.chat.tools.formats.families import Spelling, ToolFamily
from kvrelay.gateway.chat.tools.functions import Function, ToolChoice, ToolMode
from kvrelay.gateway.chat.tools.schemas import ANY_OBJECT, NO_ARGUMENTS, loosened


def tool_guide(family: ToolFamily, choice: ToolChoice, content: Guide | None = None) -> Guide | None:
    """What the answer must look like; None if it may be anything. ``content``: what an answer without calls must match.

    Raises ValueError if ``content`` is not of its kind, as far as that shows without compiling it.
    """
    spelling = family.spelling
    if family.whole_answer is not None:
        return _whole_answer(family, family.whole_answer, choice, content)
    if choice.mode is ToolMode.NONE:
        return content
    if choice.mode is ToolMode.REQUIRED:
        return guide_of(_calls(spelling, choice))
    if content is not None:
        return guide_of(either([_calls(spelling, choice), format_of(content)]))
    return _guide_of_what_begins(spelling, choice)


def _guide_of_what_begins(spelling: Spelling, choice: ToolChoice) -> Guide | None:
    """Free text, in which what begins a call goes on as one."""
    if spelling.trigger is not None:
        return guide_of(
            dispatch(spelling.trigger, _triggered(spelling, choice, spelling.trigger), is_one=choice.max_calls == 1)
        )
    if any(function.strict for function in choice.functions):
        first = (spelling.begin or spelling.before("x"))[0]
        return guide_of(either([_calls(spelling, choice), regex(rf"([^\s\{first}][\s\S]*)?")]))
    return None


def _whole_answer(
    family: ToolFamily,
    answer: Callable[[Sequence[tuple[str, Format]], Format | None], Format],
    choice: ToolChoice,
    content: Guide | None,
) -> Guide | None:
    if choice.mode is ToolMode.NONE and content is None:
        return None
    arguments = family.spelling.arguments
    calls = [(each.name, arguments(arguments_schema(each, choice.mode))) for each in choice.functions]
    text = free_text() if content is None else format_of(content)
    return guide_of(answer(calls, None if choice.mode is ToolMode.REQUIRED else text))


def guide_param(choice: ToolChoice, content_param: str | None) -> str | None:
    """The request's field to name if a worker cannot follow the guide of ``choice`` and of the content from ``content_param``.

    None if it may be either: a worker sees one guide, made of both.
    """
    if choice.mode is ToolMode.NONE:
        return content_param
    if content_param is None or choice.mode is ToolMode.REQUIRED:
        return "tools"
    return None if any(function.strict for function in choice.functions) else content_param  # others always compile


def arguments_schema(function: Function, mode: ToolMode) -> dict[str, Any]:
    """The schema that a call's arguments follow."""
    if function.parameters is None:
        return NO_ARGUMENTS
    if function.strict is False:
        return ANY_OBJECT
    if function.strict is None and mode is ToolMode.AUTO:
        return loosened(function.parameters)
    schema = {"type": "object", **function.parameters}
    return schema if schema.keys() - {"type"} else ANY_OBJECT


def _calls(spelling: Spelling, choice: ToolChoice) -> Format:
    """At least one call, and nothing else."""
    return _all_calls(spelling, choice, spelling.begin)


def _all_calls(spelling: Spelling, choice: ToolChoice, begin: str) -> Format:
    calls = tags(_tags(spelling, choice), spelling.separator, is_one=choice.max_calls == 1)
    return sequence(const(begin), calls, const(spelling.end))


def _triggered(spelling: Spelling, choice: ToolChoice, trigger: str) -> Format:
    """What follows the trigger: the rest of all calls if they share a beginning, else of one."""
    if spelling.begin:
        return _all_calls(spelling, choice, spelling.begin.removeprefix(trigger))
    return either(_tags(spelling, choice, trigger))


def _tags(spelling: Spelling, choice: ToolChoice, without: str = "") -> list[Format]:
    return [
        tag(
            spelling.before(function.name).removeprefix(without),
            spelling.arguments(arguments_schema(function, choice.mode)),
            spelling.after,
        )
        for function in choice.functions
    ]
