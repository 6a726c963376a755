"""Arguments as Python writes them, ``a=1, b="x"``: a guide (whose values are JSON, which the parser reads, too) and a writer."""

from __future__ import annotations

import json
from typing import Any

from kvrelay.gateway.structural_tag import Format, const, either, json_schema, optional, regex, sequence, star

_ANY_KEY = "[a-zA-Z_][a-zA-Z0-9_]{0,63}"


def keyword_arguments(schema: dict[str, Any]) -> Format:
    """From the schema of an object: what is required first, then what is not, each in the order of the schema.

    Properties are all that counts of the schema itself, so one that has none but is open admits any. Names that are no identifiers
    cannot be written as keywords and are left out.
    """
    properties = {name: value for name, value in schema.get("properties", {}).items() if name.isidentifier()}
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    if not properties:
        return _any_arguments() if schema.get("additionalProperties", True) else const("")

    def argument(name: str, separator: str) -> Format:
        value = properties[name]
        value = {**value, **definitions} if isinstance(value, dict) else value
        return sequence(const(f"{separator}{name}="), json_schema(value))

    required = [name for name in properties if name in schema.get("required", [])]
    others = [name for name in properties if name not in required]
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


def _any_arguments() -> Format:
    one = sequence(regex(f"{_ANY_KEY}="), json_schema(True))
    return optional(sequence(one, star(sequence(const(", "), one))))
