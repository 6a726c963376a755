"""Guides that make malformed calls impossible: they turn a tool choice into a grammar of the whole answer.

- ``required`` or a named function: the answer is calls (or the one call) from its first token on.
- ``auto``: text is free, and a text that begins a call must go on as one. This holds for every family whose calls begin with a
  marker of their own. Without such a marker, an answer that begins with ``{`` may be meant for the reader. So such a family is
  guided only if a function is ``strict``; then an answer that begins as a call is a call.
- A family whose whole answers have a format of their own (``ToolFamily.whole_answer``) is guided from the first token on.
- Arguments: a ``strict`` function follows its schema; with ``"strict": false`` its arguments are any object. Without ``strict``, a
  required call follows the schema. Under ``auto`` it follows a *loosened* schema, which always compiles: a schema that no grammar
  can express must not fail a request that can be answered with text. A loosened schema admits more values. But an object that names
  its properties and does not mention others has no others. If it is too large for a guide, arguments are any object.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvrelay.common.sampling import Guide
from kvrelay.gateway.chat import structural_tag as st
from kvrelay.gateway.chat.tools.formats.families import Spelling, ToolFamily
from kvrelay.gateway.chat.tools.functions import Function, ToolChoice, ToolMode
from kvrelay.gateway.errors import UnusableGuideError

Schema = dict[str, Any]

ANY_OBJECT: Schema = {"type": "object", "additionalProperties": True}
NO_ARGUMENTS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}

_TYPES = frozenset({"string", "number", "integer", "boolean", "array", "object", "null"})
_COMBINING = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "patternProperties", "propertyNames",
                        "dependentSchemas", "unevaluatedProperties", "minProperties"})  # fmt: skip
_DEFINITIONS = ("$defs", "definitions")


def tool_guide(family: ToolFamily, choice: ToolChoice, content: Guide | None = None) -> Guide | None:
    """The guide for the answer; None if the answer is free. ``content``: the guide for an answer without calls.

    Raises ValueError if ``content`` is malformed, as far as that can be seen without compiling it. Raises UnusableGuideError if
    arguments that must follow their schema need too large a guide.
    """
    spelling, mode = family.spelling, choice.mode
    if family.whole_answer is not None:
        if mode is ToolMode.NONE and content is None:
            return None
        calls = [(each.name, _arguments(spelling, each, mode)) for each in choice.functions]
        text = st.free_text() if content is None else st.format_of(content)
        part = family.whole_answer(calls, None if mode is ToolMode.REQUIRED else text)
    elif mode is ToolMode.NONE:
        return content
    elif mode is ToolMode.REQUIRED:
        part = _calls(spelling, choice)
    elif content is not None:
        part = st.either([_calls(spelling, choice), st.format_of(content)])
    elif (trigger := spelling.trigger) is not None:
        part = st.dispatch(trigger, _calls(spelling, choice, trigger), is_one=choice.max_calls == 1)
    elif any(function.strict for function in choice.functions):
        first = (spelling.begin or spelling.before("x"))[0]
        part = st.either([_calls(spelling, choice), st.regex(rf"([^\s\{first}][\s\S]*)?")])
    else:
        return None
    return st.guide_of(part)


def guide_param(choice: ToolChoice, content_param: str | None) -> str | None:
    """The request's field to name if a worker cannot follow the guide made of ``choice`` and of ``content_param``.

    None if either may be at fault, because a worker sees one guide made of both.
    """
    if choice.mode is ToolMode.NONE:
        return content_param
    if content_param is None or choice.mode is ToolMode.REQUIRED:
        return "tools"
    # The schemas of other functions always compile.
    return None if any(function.strict for function in choice.functions) else content_param


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


def _calls(spelling: Spelling, choice: ToolChoice, trigger: str = "") -> st.Format:
    """At least one call and nothing else.

    After a ``trigger``: the rest of all calls if they share a beginning, else of one call.
    """
    calls = [
        st.tag(
            spelling.before(function.name).removeprefix(trigger),
            _arguments(spelling, function, choice.mode),
            spelling.after,
        )
        for function in choice.functions
    ]
    if trigger and not spelling.begin:
        return st.either(calls)
    row = st.tags(calls, spelling.separator, is_one=choice.max_calls == 1)
    return st.sequence(st.const(spelling.begin.removeprefix(trigger)), row, st.const(spelling.end))


def _arguments(spelling: Spelling, function: Function, mode: ToolMode) -> st.Format:
    """The format of a call's arguments: any, if a loosened schema is too large. Raises UnusableGuideError for another schema."""
    try:
        return spelling.arguments(arguments_schema(function, mode))
    except UnusableGuideError:
        if function.strict is not None or mode is not ToolMode.AUTO:
            raise
        return spelling.arguments(ANY_OBJECT)


def loosened(schema: Mapping[str, Any]) -> Schema:
    """The schema of an object, reduced to keywords that always compile: types, properties, items, values, choices, references."""
    loose = _loose(schema, schema)
    for key in _DEFINITIONS:
        if isinstance(schema.get(key), Mapping):
            loose[key] = {name: _loose(part, schema) for name, part in schema[key].items()}
    return {**loose, "type": "object"}


def _loose(schema: Any, root: Mapping[str, Any]) -> Schema:
    if not isinstance(schema, Mapping):
        return {}
    target = schema.get("$ref")
    if target is not None:
        return {"$ref": target} if _resolves(target, root) else {}
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return {"enum": schema["enum"]}
    if "const" in schema:
        return {"const": schema["const"]}
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and schema[key] and "properties" not in schema:
            return {"anyOf": [_loose(part, root) for part in schema[key]]}
    loose: Schema = {}
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if isinstance(kinds, list) and kinds and all(isinstance(kind, str) and kind in _TYPES for kind in kinds):
        loose["type"] = schema["type"]
    if isinstance(schema.get("items"), Mapping):
        loose["items"] = _loose(schema["items"], root)
    if isinstance(schema.get("properties"), Mapping):
        loose |= _loose_object(schema, root)
    return loose


def _loose_object(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Schema:
    properties = {name: _loose(part, root) for name, part in schema["properties"].items()}
    required = schema.get("required")
    is_open = bool(schema.get("additionalProperties", False)) or bool(_COMBINING & schema.keys())
    return {
        "properties": properties,
        "required": [name for name in properties if isinstance(required, list) and name in required],
        "additionalProperties": is_open,
    }


def _resolves(target: Any, root: Mapping[str, Any]) -> bool:
    """Whether a reference leads to a definition in this schema, not only to further references."""
    seen: set[Any] = set()
    while isinstance(target, str) and target not in seen:
        seen.add(target)
        start, _, name = target.removeprefix("#/").partition("/")
        definitions = root.get(start)
        if not target.startswith("#/") or start not in _DEFINITIONS or not isinstance(definitions, Mapping):
            return False
        if not isinstance(definitions.get(name), Mapping):
            return False
        target = definitions[name].get("$ref")
    return target is None
