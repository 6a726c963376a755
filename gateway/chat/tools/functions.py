"""The functions that a request lets the model call, and how free it is to call them: ``tools`` and ``tool_choice``."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvrelay.gateway.errors import InvalidRequestError

MAX_TOOLS = 128
MAX_SCHEMA_DEPTH = 64

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """One function, validated."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON Schema of an object; None: no parameters
    strict: bool | None = None  # whether its arguments must follow the schema; None: the tool choice decides
    param: str = "tools"  # where the request declares it

    def as_tool(self) -> dict[str, Any]:
        """As chat templates expect it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = _NO_PARAMETERS if self.parameters is None else self.parameters
        return {"type": "function", "function": function}


class ToolMode(enum.StrEnum):
    """How free the model is."""

    AUTO = "auto"  # text or calls
    NONE = "none"  # text
    REQUIRED = "required"  # at least one call, and nothing else


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The functions that the model may call, and under which rules."""

    mode: ToolMode = ToolMode.NONE
    functions: tuple[Function, ...] = ()  # the functions that may be called
    shown: tuple[Function, ...] = ()  # the functions in the prompt, which does not change with the choice
    is_named: bool = False  # the request named the one function
    allows_parallel: bool = True  # several calls in one answer

    @property
    def max_calls(self) -> int | None:
        """How many calls one answer may have; None: any number."""
        if self.mode is ToolMode.NONE:
            return 0
        return None if self.allows_parallel and not self.is_named else 1


def parse_tools(tools: Sequence[Any] | None) -> tuple[Function, ...]:
    """A request's functions, in the shape of OpenAI's chat completions (nested), of its responses (flat), or of Anthropic's API.

    Raises InvalidRequestError naming the field.
    """
    tools = tools or ()
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"tools has {len(tools)} tools; at most {MAX_TOOLS} are allowed", param="tools")
    functions: dict[str, Function] = {}
    for index, tool in enumerate(tools):
        function = _function(tool, f"tools[{index}]")
        if function.name in functions:
            raise InvalidRequestError(
                f"{function.param}.name {function.name!r} is declared twice; give every function a name of its own",
                param=f"{function.param}.name",
            )
        functions[function.name] = function
    return tuple(functions.values())


def parse_tool_choice(choice: Any, functions: tuple[Function, ...], *, allows_parallel: bool = True) -> ToolChoice:
    """The meaning of ``tool_choice`` for ``functions``. None is ``auto`` with functions, and ``none`` without.

    Takes ``auto``, ``none``, ``required``, a named function and ``allowed_tools``, nested or flat. Raises InvalidRequestError.
    """
    if choice is None:
        choice = "auto" if functions else "none"
    is_named, shown = False, functions
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        functions, choice = _allowed(_nested(choice, "allowed_tools"), functions)
    elif isinstance(choice, Mapping) and choice.get("type") == "function":
        functions, choice, is_named = (_named(choice, functions),), "required", True
    if choice not in ("auto", "none", "required"):
        raise InvalidRequestError(
            f'tool_choice is {str(choice)[:80]!r}; it must be "auto", "none", "required", or an object that names a function: '
            '{"type": "function", "function": {"name": …}}',
            param="tool_choice",
        )
    mode = ToolMode(choice)
    if mode is ToolMode.REQUIRED and not functions:
        raise InvalidRequestError(
            "tool_choice asks for a call, but there are no tools; send tools, too", param="tool_choice"
        )
    if mode is ToolMode.NONE or not functions:
        return ToolChoice()
    return ToolChoice(mode=mode, functions=functions, shown=shown, is_named=is_named, allows_parallel=allows_parallel)


def _function(tool: Any, param: str) -> Function:
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        kind = tool.get("type") if isinstance(tool, Mapping) else tool
        raise InvalidRequestError(
            f'{param}.type is {str(kind)[:80]!r}; only "function" is supported', param=f"{param}.type"
        )
    fields, where = (tool["function"], f"{param}.function") if "function" in tool else (tool, param)
    if not isinstance(fields, Mapping):
        raise InvalidRequestError(f"{where} must be an object with a name", param=where)
    name = fields.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{where}.name is {str(name)[:80]!r}; it must be 1 to 64 letters, digits, '_' and '-'",
            param=f"{where}.name",
        )
    for key, kind in (("description", str), ("strict", bool)):
        if not isinstance(fields.get(key), kind | None):
            expected = "text" if kind is str else "true or false"
            raise InvalidRequestError(f"{where}.{key} must be {expected}", param=f"{where}.{key}")
    key = "input_schema" if "input_schema" in fields else "parameters"
    if (parameters := _without_nulls(fields.get(key))) is not None:
        _check_schema(parameters, f"{where}.{key}")
    return Function(
        name=name,
        description=fields.get("description"),
        parameters=dict(parameters) if parameters else None,  # an empty schema equals none
        strict=fields.get("strict"),
        param=where,
    )


def _without_nulls(schema: Any) -> Any:
    """``schema`` without ``properties`` and ``required`` that are null: typed clients send so what they leave out."""
    if not isinstance(schema, Mapping):
        return schema
    optional = ("properties", "required")
    return {key: value for key, value in schema.items() if value is not None or key not in optional}


def _check_schema(schema: Any, param: str) -> None:
    if not isinstance(schema, Mapping):
        raise InvalidRequestError(f"{param} must be a JSON Schema object, not {str(schema)[:80]!r}", param=param)
    if schema.get("type", "object") != "object":
        raise InvalidRequestError(
            f'{param}.type is {str(schema["type"])[:80]!r}; a function\'s parameters are a schema of "type": "object"',
            param=f"{param}.type",
        )
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping) or not all(
        isinstance(value, Mapping | bool) for value in properties.values()
    ):
        raise InvalidRequestError(f"{param}.properties must hold a schema for each name", param=f"{param}.properties")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise InvalidRequestError(f"{param}.required must be a list of names", param=f"{param}.required")
    # Checked level by level: a schema can be so deep that a recursive check would overflow the stack.
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [item for value in level for item in _items(value)]
        if not level:
            return
    raise InvalidRequestError(f"{param} is nested deeper than {MAX_SCHEMA_DEPTH} levels; make it flatter", param=param)


def _items(value: Any) -> Sequence[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list) else ()


def _nested(value: Mapping[str, Any], name: str) -> Any:
    """The fields of ``name``: chat completions nest what responses write flat."""
    return value.get(name, value)


def _named(choice: Mapping[str, Any], functions: tuple[Function, ...]) -> Function:
    fields = _nested(choice, "function")
    name = fields.get("name") if isinstance(fields, Mapping) else None
    for function in functions:
        if function.name == name:
            return function
    known = ", ".join(function.name for function in functions) or "none"
    raise InvalidRequestError(
        f"tool_choice names the function {str(name)[:80]!r}, which is not among the tools ({known[:400]})",
        param="tool_choice",
    )


def _allowed(fields: Any, functions: tuple[Function, ...]) -> tuple[tuple[Function, ...], Any]:
    tools = fields.get("tools") if isinstance(fields, Mapping) else None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidRequestError("tool_choice.tools must be a list of functions", param="tool_choice.tools")
    names = {_named(tool, functions).name for tool in tools}
    return tuple(function for function in functions if function.name in names), fields.get("mode", "auto")
