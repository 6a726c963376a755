"""Alternatives of a JSON Schema: which of ``oneOf`` exclude each other, and what a type beside ``anyOf`` does to them."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any
from urllib.parse import unquote

from kvrelay.engine.guide_errors import UnsupportedGuideError

_MAX_REFERENCES = 16  # one leading to the next


def resolve(root: Any, reference: str) -> Any:
    """What a JSON pointer behind ``#`` leads to (RFC 6901). None if it leads nowhere."""
    place = root
    for part in reference.removeprefix("#").split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(place, dict):
            place = place.get(name)
        elif isinstance(place, list) and name.isdecimal() and int(name) < len(place):
            place = place[int(name)]
        else:
            return None
    return place


def with_type(branch: Any, types: Any, where: str) -> Any:
    """``branch`` if its own type is of ``types``, or it with that type. Raises UnsupportedGuideError if it is neither."""
    if branch is True:
        return {"type": types}
    wanted = set(types if isinstance(types, list) else [types])
    if isinstance(branch, dict) and "type" not in branch and "$ref" not in branch:
        return {**branch, "type": types}
    own = branch.get("type") if isinstance(branch, dict) else None
    if own is not None and set(own if isinstance(own, list) else [own]) <= wanted | (
        {"integer"} if "number" in wanted else set()
    ):
        return branch
    raise UnsupportedGuideError(
        f"{where}: a 'type' beside it, and another one or a reference in it, cannot be followed together"
    )


def are_disjoint(branches: list[Any], root: Any) -> bool:
    """Whether no value matches two of the schemas, as far as types, constants and required constants tell."""
    resolved = [_resolved(branch, root) for branch in branches]
    return all(_exclude(first, second, root) for first, second in combinations(resolved, 2))


def _resolved(schema: Any, root: Any) -> dict[str, Any]:
    for _ in range(_MAX_REFERENCES):
        if not (isinstance(schema, dict) and isinstance(schema.get("$ref"), str)):
            break
        schema = resolve(root, schema["$ref"])
    return schema if isinstance(schema, dict) else {}


def _exclude(first: dict[str, Any], second: dict[str, Any], root: Any) -> bool:
    values, others = _constants(first), _constants(second)
    if values is not None and others is not None:
        return not values & others
    types, other_types = _types(first), _types(second)
    if types is not None and other_types is not None and not types & other_types:
        return True
    if types != {"object"} or other_types != {"object"}:
        return False
    for name in set(_required(first)) & set(_required(second)):
        inner, other = (_constants(_resolved(one.get("properties", {}).get(name), root)) for one in (first, second))
        if inner is not None and other is not None and not inner & other:
            return True
    return False


def _required(schema: dict[str, Any]) -> list[str]:
    names = schema.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _constants(schema: dict[str, Any]) -> set[str] | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    return {json.dumps(float(one) if type(one) is int and abs(one) < 2**53 else one, sort_keys=True) for one in values}


def _types(schema: dict[str, Any]) -> set[str] | None:
    types = schema.get("type")
    if types is None:
        return None
    found = set(types) if isinstance(types, list) else {types}
    return found | {"integer"} if "number" in found else found
