"""Calls in Python's notation, ``[f(a=1, b="x"), g()]``: Llama 4 and LFM2.

An answer is a call if it begins with ``[`` and the call of a known function. Llama may put ``<|python_start|>`` and
``<|python_end|>`` around it; LFM2 always puts ``<|tool_call_start|>`` and ``<|tool_call_end|>``. Values are literals. They are
parsed as JSON or as Python's syntax tree and never evaluated. A guide writes them as JSON.
"""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from typing import Any, NoReturn

from kvrelay.common.sampling_check import MAX_GUIDE_BYTES
from kvrelay.gateway.chat.structural_tag import Format, const, either, json_schema, optional, regex, sequence, star
from kvrelay.gateway.chat.tools.parser import Context, ListEnd, Syntax, read_rest
from kvrelay.gateway.chat.tools.reader import Reader, Reading
from kvrelay.gateway.errors import UnusableGuideError

BEGIN, END = "<|python_start|>", "<|python_end|>"
LFM_BEGIN, LFM_END = "<|tool_call_start|>", "<|tool_call_end|>"

_KEY = re.compile(r"""[^\s=(),:'"\[\]{}]*""")
_ANY_KEY = "[a-zA-Z_][a-zA-Z0-9_]{0,63}"
_ENDS = {BEGIN: END, LFM_BEGIN: LFM_END}
_NAMES: dict[str, Any] = {"true": True, "false": False, "null": None}  # models mix the two languages


def _read(context: Context, marker: str) -> Reading[bool]:
    reader = context.reader
    yield from reader.spaces()
    if not (yield from reader.next_is("[")):
        return False
    end = yield from read_rest(context, _read_call)
    if end is ListEnd.CLOSED and marker:
        yield from context.close(_ENDS[marker])
    return end is not ListEnd.MALFORMED


def _read_call(context: Context) -> Reading[bool]:
    reader = context.reader
    name = yield from reader.word()
    if not context.may_call(name) or not (yield from reader.next_is("(")):
        return False
    write = context.writer(name)
    yield from reader.spaces()
    if (yield from reader.next_is(")")):
        write("{}")
        return True
    before, end = "{", ","
    while end == ",":
        yield from reader.spaces()
        key = yield from reader.word(_KEY, 256)
        yield from reader.spaces()
        if not key or not (yield from reader.next_is("=")):
            return False
        text = yield from _literal(reader)
        value = None if text is None else literal_json(text)
        if value is None:
            return False
        end = (yield from reader.next_is(",", ")")) or ""
        write(f"{before}{json.dumps(key, ensure_ascii=False)}: {value}" + ("}" if end == ")" else ""))
        before = ", "
    return True


def _literal(reader: Reader) -> Reading[str | None]:
    """Read up to the comma or bracket after a value; None if there is none."""
    at, depth, quote = 0, 0, ""
    while True:
        rest = reader.rest
        while at < len(rest):
            char = rest[at]
            if quote and char == "\\":
                at += 1  # an escaped character does not end the text either
            elif quote:
                quote = "" if char == quote else quote
            elif char in "'\"":
                quote = char
            elif char in "([{":
                depth += 1
            elif depth and char in ")]}":
                depth -= 1
            elif not depth and char in ",)]}":
                reader.skip(at)
                return rest[:at] if char in ",)" else None
            at += 1
        if reader.is_finished:
            reader.skip(len(rest))
            return None
        yield


def literal_json(text: str) -> str | None:
    """A literal of JSON or Python as JSON; None if it is no literal, or has a value that JSON cannot hold."""
    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        try:
            with warnings.catch_warnings():  # Python warns of backslashes that escape nothing, which models write
                warnings.simplefilter("ignore")
                value = _plain(ast.parse(text.strip(), mode="eval").body)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        written.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    except (ValueError, RecursionError):
        return None
    return written


def refuse_constant(text: str) -> NoReturn:
    """For ``json.loads``. Raises ValueError on ``NaN`` and infinities."""
    raise ValueError(f"{text} is not JSON")


def _plain(node: ast.expr) -> Any:
    """The value of a literal. Raises ValueError on anything else."""
    match node:
        case ast.Constant(value=None | bool() | int() | str() as value):
            return value
        case ast.Constant(value=float() as value) if math.isfinite(value):
            return value
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as value)):
            return -value if isinstance(sign, ast.USub) else value
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return [_plain(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _plain(value) for key, value in zip(keys, values, strict=True)}
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case _:
            raise ValueError(f"{ast.dump(node)[:80]} is no literal")


def _key(node: ast.expr | None) -> str:
    match node:
        case ast.Constant(value=str() as text):
            return text
        case _:
            raise ValueError("keys are text")


def keyword_arguments(schema: dict[str, Any]) -> Format:
    """The format of keyword arguments from the schema of an object: required ones first, then optional ones, in the schema's order.

    Only the schema's properties count. An open schema without properties admits any arguments. A name that is no Python identifier
    cannot be a keyword and is left out.

    Without a required argument, an optional one is written anew for each that may be the first; definitions come with every one.
    Raises UnusableGuideError if that is too large for a guide.
    """
    properties = {name: value for name, value in schema.get("properties", {}).items() if name.isidentifier()}
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    if not properties:
        return _any_arguments() if schema.get("additionalProperties", True) else const("")

    def argument(name: str, separator: str) -> Format:
        value = properties[name]
        value = {**value, **definitions} if isinstance(value, dict) else value
        return sequence(const(f"{separator}{name}="), json_schema(value))

    names = set(schema.get("required", []))
    required = [name for name in properties if name in names]
    others = [name for name in properties if name not in names]
    shared_size, size = _size(definitions), 0  # counted first: to write it may take gigabytes
    for index, name in enumerate([*required, *others]):
        num_times = 1 if required else index + 1
        size += num_times * (_size(sequence(const(f"{name}="), json_schema(properties[name]))) + shared_size)
    if size > MAX_GUIDE_BYTES:
        raise UnusableGuideError(
            "tools",
            f"a function's {len(properties)} arguments take {size} bytes of guide; at most {MAX_GUIDE_BYTES} are allowed: leave "
            "some out, or require one if none is",
        )
    if required:
        first, *rest = required
        more = [optional(argument(name, ", ")) for name in others]
        return sequence(argument(first, ""), *(argument(name, ", ") for name in rest), *more)
    beginnings = [
        sequence(argument(name, ""), *(optional(argument(later, ", ")) for later in others[index + 1 :]))
        for index, name in enumerate(others)
    ]
    return optional(either(beginnings))


def write_keywords(arguments: str) -> str:
    """JSON text of an object as keyword arguments."""
    return ", ".join(f"{name}={value!r}" for name, value in json.loads(arguments).items())


def _size(value: Any) -> int:
    """The least number of bytes that a guide needs for it."""
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def _any_arguments() -> Format:
    one = sequence(regex(f"{_ANY_KEY}="), json_schema(True))
    return optional(sequence(one, star(sequence(const(", "), one))))


SYNTAX = Syntax((BEGIN, LFM_BEGIN), _read, starts="[")
