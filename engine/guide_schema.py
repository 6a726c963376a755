"""A client's JSON Schema as one that xgrammar follows to the letter, or the keyword for which there is none.

xgrammar ignores some keywords, warns of others, and looks at only one where several stand side by side. A document that breaks
the client's schema must never come of that. So a schema is rewritten here: into one that allows the same documents or fewer, or,
where that is not known to be possible, it is refused with the keyword and its place. What JSON Schema itself calls an annotation
(``title``, ``default``, formats of nobody's standard) and what nobody knows is left out.
"""

from __future__ import annotations

import json
from typing import Any

from kvrelay.engine.guide_errors import UnsupportedGuideError
from kvrelay.engine.guide_pattern import SAFE_CHARACTER, json_string_pattern
from kvrelay.engine.guide_union import are_disjoint, resolve, with_type

_MAX_DEPTH = 64  # of schemas in schemas; compilation takes more than linear time
_INT64 = range(-(2**63), 2**63)
_CHOOSERS = (
    "$ref",
    "const",
    "enum",
    "anyOf",
    "oneOf",
    "allOf",
)  # xgrammar looks at the first of these and at nothing else
_BY_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems"),
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties"),
        *("propertyNames", "minProperties", "maxProperties", "unevaluatedProperties"),
    ),
}
_ASSERTIONS = frozenset({*_CHOOSERS, "type", *(keyword for group in _BY_TYPE.values() for keyword in group)})
_REFUSED = (
    *("not", "if", "contains", "dependentRequired", "dependentSchemas", "dependencies"),
    *("$dynamicRef", "$recursiveRef"),
)
_ENFORCED_FORMATS = frozenset(
    {
        *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
        *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
    }
)
_REFUSED_FORMATS = frozenset({"idn-email", "idn-hostname", "iri", "iri-reference", "regex"})


def followable_schema(text: str) -> str:
    """``text`` as a schema that xgrammar follows. Raises UnsupportedGuideError, with a message for the client."""
    return json.dumps(followable(parse_json(text, "the schema")))


def parse_json(text: str, what: str) -> Any:
    """The JSON in ``text``. Raises UnsupportedGuideError, naming ``what`` it is."""

    def refuse(name: str) -> float:
        raise ValueError(f"{name} is no JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise UnsupportedGuideError(f"{what} is not JSON: {error}") from error


def followable(schema: Any) -> Any:
    """The schema as xgrammar follows it. Raises UnsupportedGuideError."""
    rewriter = _Rewriter(schema)
    try:
        rewritten = rewriter.rewrite(schema, "", 0)
        rewriter.check_references()
    except (TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        raise UnsupportedGuideError(f"the schema is no valid JSON Schema: {error}") from error
    return rewritten


class _Rewriter:
    """One pass over a schema; ``where`` is the path to the place that is looked at."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._seen: set[int] = set()  # ids of the schemas that were looked at
        self._references: list[tuple[str, str]] = []

    def check_references(self) -> None:
        """What a reference leads to must have been looked at."""
        for reference, where in self._references:
            if id(resolve(self._root, reference)) not in self._seen:
                raise UnsupportedGuideError(f"{where}: {reference!r} leads to no schema of this document")

    def rewrite(self, schema: Any, where: str, depth: int) -> Any:
        self._seen.add(id(schema))
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise UnsupportedGuideError(f"{where or 'the schema'} is not a JSON Schema: {str(schema)[:80]!r}")
        if depth > _MAX_DEPTH:
            raise UnsupportedGuideError(f"{where}: schemas are nested deeper than {_MAX_DEPTH}")
        for keyword in _REFUSED:
            if keyword in schema:
                raise _unsupported(keyword, where)
        if depth and "$id" in schema:
            raise _unsupported("$id", where)
        result = self._assertions(schema, where, depth)
        for keyword in ("$defs", "definitions"):
            if isinstance(schema.get(keyword), dict):
                result[keyword] = self._each(schema[keyword], f"{where}.{keyword}", depth)
        return result

    def _each(self, schemas: dict[str, Any], where: str, depth: int) -> dict[str, Any]:
        return {name: self.rewrite(schema, f"{where}.{name}", depth + 1) for name, schema in schemas.items()}

    def _assertions(self, schema: dict[str, Any], where: str, depth: int) -> dict[str, Any]:
        chooser = next((keyword for keyword in _CHOOSERS if keyword in schema), None)
        if chooser is not None:
            beside = [keyword for keyword in schema if keyword in _ASSERTIONS - {chooser}]
            may_have_type = chooser in {"const", "enum", "anyOf", "oneOf"}
            for keyword in beside:
                if not (keyword == "type" and may_have_type):
                    raise UnsupportedGuideError(
                        f"{where}: {keyword!r} beside {chooser!r} cannot be followed".lstrip(": ")
                    )
            return self._choice(chooser, schema, where, depth)
        types = schema.get("type")
        if types is None:
            # A value of another type would meet the schema, too. Who writes ``minimum`` wants numbers.
            types = [kind for kind, keywords in _BY_TYPE.items() if any(keyword in schema for keyword in keywords)]
            if not types:
                return {}
        result: dict[str, Any] = {"type": types[0] if isinstance(types, list) and len(types) == 1 else types}
        kinds = set(types if isinstance(types, list) else [types])
        if "string" in kinds:
            result |= _string(schema, where)
        if kinds & {"number", "integer"}:
            result |= {keyword: schema[keyword] for keyword in _BY_TYPE["number"] if keyword in schema}
        if "array" in kinds:
            result |= self._array(schema, where, depth)
        if "object" in kinds:
            result |= self._object(schema, where, depth)
        return result

    def _choice(self, chooser: str, schema: dict[str, Any], where: str, depth: int) -> dict[str, Any]:
        value = schema[chooser]
        at = f"{where}.{chooser}"
        if chooser == "$ref":
            if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
                raise UnsupportedGuideError(
                    f"{at} is {str(value)[:80]!r}; it must lead to a place in the schema itself, as '#/$defs/x'"
                )
            self._references.append((value, at))
            return {"$ref": value}
        if chooser in {"const", "enum"}:
            return _values(value if chooser == "enum" else [value], schema.get("type"), at)
        if not isinstance(value, list) or not value:
            raise UnsupportedGuideError(f"{at} must be a list of schemas")
        if chooser == "allOf" and len(value) > 1:
            raise _unsupported("allOf", where)
        if chooser == "oneOf" and not are_disjoint(value, self._root):
            raise UnsupportedGuideError(
                f"{at}: a value may match several of its schemas; use 'anyOf' if that is no harm"
            )
        self._seen.update(map(id, value))
        branches = [with_type(branch, schema["type"], at) if "type" in schema else branch for branch in value]
        rewritten = [self.rewrite(branch, f"{at}[{index}]", depth + 1) for index, branch in enumerate(branches)]
        return {"allOf" if chooser == "allOf" else "anyOf": rewritten}

    def _array(self, schema: dict[str, Any], where: str, depth: int) -> dict[str, Any]:
        if schema.get("uniqueItems") and not _at_most(schema.get("maxItems"), 1):
            raise _unsupported("uniqueItems", where)
        result: dict[str, Any] = {keyword: schema[keyword] for keyword in ("minItems", "maxItems") if keyword in schema}
        first = schema.get("prefixItems", [])
        if not isinstance(first, list) or isinstance(schema.get("items"), list):
            raise UnsupportedGuideError(f"{where}.items must be a schema, and .prefixItems a list of them".lstrip("."))
        if first:
            result["prefixItems"] = [
                self.rewrite(item, f"{where}.prefixItems[{index}]", depth + 1) for index, item in enumerate(first)
            ]
        rest = next((keyword for keyword in ("items", "unevaluatedItems") if keyword in schema), None)
        if rest is not None:
            result["items"] = self.rewrite(schema[rest], f"{where}.{rest}", depth + 1)
        elif not first or not _at_most(schema.get("minItems", 0), len(first)):
            result["items"] = {}
        return result

    def _object(self, schema: dict[str, Any], where: str, depth: int) -> dict[str, Any]:
        counts = ("required", "minProperties", "maxProperties")
        result: dict[str, Any] = {keyword: schema[keyword] for keyword in counts if keyword in schema}
        for keyword in ("properties", "patternProperties"):
            if not isinstance(schema.get(keyword, {}), dict):
                raise UnsupportedGuideError(f"{where}.{keyword} must be an object".lstrip("."))
        properties = self._each(schema.get("properties", {}), f"{where}.properties", depth)
        patterns = self._each(schema.get("patternProperties", {}), f"{where}.patternProperties", depth)
        if patterns and (properties or len(patterns) > 1 or "propertyNames" in schema):
            # One name may be under several schemas then, of which xgrammar takes one.
            raise _unsupported("patternProperties", where)
        if "propertyNames" in schema:
            if properties or schema.get("required") or schema.get("additionalProperties", True) not in (True, {}):
                raise _unsupported("propertyNames", where)
            names = self.rewrite(schema["propertyNames"], f"{where}.propertyNames", depth + 1)
            if not _is_of_strings(names):
                raise _unsupported("propertyNames", where)
            result["propertyNames"] = names
        others = next(
            (keyword for keyword in ("additionalProperties", "unevaluatedProperties") if keyword in schema), None
        )
        if others is not None and not patterns:
            result["additionalProperties"] = self.rewrite(schema[others], f"{where}.{others}", depth + 1)
        required = schema.get("required", [])
        if isinstance(required, list):
            self._add_required(properties, required, result.get("additionalProperties", {}), patterns, where)
        if properties:
            result["properties"] = properties
        if patterns:
            result["patternProperties"] = {json_string_pattern(name): inner for name, inner in patterns.items()}
        has_others = (
            bool(patterns)
            or "propertyNames" in result
            or result.get("additionalProperties", not properties) is not False
        )
        least = schema.get("minProperties", 0)
        if has_others and not _at_most(least, len(set(map(str, required))) + 1):
            # Names that the schema does not give may come twice, and count once.
            raise _unsupported("minProperties", where)
        if has_others and not properties and not patterns and least:
            result.setdefault("additionalProperties", {})
        return result

    def _add_required(
        self, properties: dict[str, Any], required: list[Any], others: Any, patterns: dict[str, Any], where: str
    ) -> None:
        """Declare what is required and not declared: xgrammar would forget it."""
        for name in required:
            if isinstance(name, str) and name not in properties:
                if patterns or others is False:
                    raise UnsupportedGuideError(
                        f"{where}.required has {name[:80]!r}, which .properties does not have".lstrip(".")
                    )
                properties[name] = {} if others is True else others


def _values(values: Any, types: Any, where: str) -> dict[str, Any]:
    """An enum of the values that are of the types."""
    if not isinstance(values, list):
        raise UnsupportedGuideError(f"{where} must be a list")
    kinds = None if types is None else set(types if isinstance(types, list) else [types])
    left = [value for value in values if kinds is None or kinds & _types_of(value)]
    if not left:
        raise UnsupportedGuideError(f"{where} has no value of the type {types!r}")
    for value in left:
        _check_numbers(value, where)
    return {"enum": left}


def _types_of(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if value == int(value) else {"number"}
    return {{str: "string", list: "array", dict: "object", type(None): "null"}[type(value)]}


def _check_numbers(value: Any, where: str) -> None:
    is_too_big = (
        value not in _INT64 if isinstance(value, int) else isinstance(value, float) and abs(value) == float("inf")
    )
    if is_too_big:
        raise UnsupportedGuideError(f"{where} has {value}, which does not fit 64 bits")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_numbers(inner, where)


def _string(schema: dict[str, Any], where: str) -> dict[str, Any]:
    format_name, pattern = schema.get("format"), schema.get("pattern")
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if format_name in _REFUSED_FORMATS:
        raise UnsupportedGuideError(f"{where}.format {format_name!r} cannot be followed".lstrip("."))
    is_enforced = format_name in _ENFORCED_FORMATS
    has_length = bool(least) or most is not None
    if is_enforced + (pattern is not None) + has_length > 1:
        names = [name for name in ("format", "pattern", "minLength", "maxLength") if name in schema]
        raise UnsupportedGuideError(
            f"{where}: {' and '.join(names)} of one string cannot be followed together".lstrip(": ")
        )
    if is_enforced:
        return {"format": format_name}
    if pattern is not None:
        if not isinstance(pattern, str):
            raise UnsupportedGuideError(f"{where}.pattern must be a string".lstrip("."))
        return {"pattern": f"^(?:{json_string_pattern(pattern)})$"}
    if not has_length:
        return {}
    if not _is_count(least) or not (most is None or _is_count(most)) or (most is not None and least > most):
        raise UnsupportedGuideError(f"{where}: minLength {least!r} and maxLength {most!r} leave no string".lstrip(": "))
    # xgrammar's own strings of a given length may hold control characters, which JSON does not allow.
    return {"pattern": f"^{SAFE_CHARACTER}{{{int(least)},{'' if most is None else int(most)}}}$"}


def _is_of_strings(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    values = schema.get("enum")
    return schema.get("type") == "string" or (values is not None and all(isinstance(one, str) for one in values))


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 and value == int(value)


def _at_most(value: Any, limit: int) -> bool:
    return isinstance(value, int | float) and value <= limit


def _unsupported(keyword: str, where: str) -> UnsupportedGuideError:
    place = f" at {where.lstrip('.')}" if where else ""
    return UnsupportedGuideError(
        f"the schema's {keyword!r}{place} cannot be followed: documents would not be sure to meet it"
    )
