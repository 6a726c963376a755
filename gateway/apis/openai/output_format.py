"""Turns the output formats of OpenAI's and vLLM's APIs into guides. The workers compile the grammars."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from kvrelay.common.sampling import Guide, GuideKind
from kvrelay.gateway.errors import InvalidRequestError

_MAX_CHOICES = 1024
_VLLM_FIELDS = {  # keys of ``structured_outputs``, and the older top-level fields
    "json": GuideKind.JSON_SCHEMA,
    "regex": GuideKind.REGEX,
    "choice": GuideKind.CHOICE,
    "grammar": GuideKind.GRAMMAR,
    "json_object": GuideKind.JSON_OBJECT,
    "structural_tag": GuideKind.STRUCTURAL_TAG,
}

GUIDED_FIELDS = frozenset(f"guided_{name}" for name in _VLLM_FIELDS)


class RequestedGuide(msgspec.Struct, frozen=True):
    """A guide and where it came from."""

    guide: Guide
    param: str  # the client's field, such as ``structured_outputs.regex``; workers do not know it


def requested_guide(response_format: Any, structured_outputs: Any, fields: Mapping[str, Any]) -> RequestedGuide | None:
    """The one guide that a body asks for; None if it asks for none. ``fields``: the other fields of the body, such as
    ``guided_json``.

    Raises InvalidRequestError naming the wrong field, or the two fields that contradict each other.
    """
    found: dict[str, Guide] = {}
    if (guide := format_guide(response_format)) is not None:
        found["response_format"] = guide
    for param, guide in _of_structured_outputs(structured_outputs).items():
        found[param] = guide
    for name, kind in _VLLM_FIELDS.items():
        param = f"guided_{name}"
        if (value := fields.get(param)) is not None and value is not False:
            found[param] = make_guide(kind, value, param)
    if len(found) > 1:
        raise InvalidRequestError(
            f"{' and '.join(found)} are given together; the output can match one of them",
            param=next(iter(found)).partition(".")[0],
        )
    return next((RequestedGuide(guide, param) for param, guide in found.items()), None)


def make_guide(kind: GuideKind, value: Any, param: str) -> Guide:
    """A guide from a client's ``value``. Raises InvalidRequestError if it has the wrong type."""
    match kind:
        case GuideKind.JSON_OBJECT:
            _require(value is True, param, "true", value)
            return Guide(kind=kind)
        case GuideKind.JSON_SCHEMA:
            if isinstance(value, str):
                value = _parsed(value, param)
            _require(isinstance(value, dict | bool), param, "a JSON Schema", value)
            return Guide(kind=kind, text=_written(value, param))
        case GuideKind.CHOICE:
            are_texts = isinstance(value, list) and all(isinstance(choice, str) and choice for choice in value)
            _require(are_texts and 0 < len(value) <= _MAX_CHOICES, param, f"1 to {_MAX_CHOICES} strings", value)
            return Guide(kind=kind, text=json.dumps(value))
        case GuideKind.STRUCTURAL_TAG:
            if isinstance(value, str):
                value = _parsed(value, param)
            _require(isinstance(value, dict), param, "a structural tag, an object", value)
            return Guide(kind=kind, text=_written({"type": "structural_tag", **value}, param))
        case GuideKind.REGEX | GuideKind.GRAMMAR:
            _require(isinstance(value, str) and value, param, "a string", value)
            return Guide(kind=kind, text=value)


def format_guide(value: Any, param: str = "response_format") -> Guide | None:
    """The guide of a field that describes the answer's format. Raises InvalidRequestError naming the field ``param``."""
    if value is None:
        return None
    _require(isinstance(value, dict), param, "an object with a type", value)
    match value.get("type"):
        case "text":
            return None
        case "json_object" | "json" if value.get("value") is not None:  # as Hugging Face's clients write a schema
            return make_guide(GuideKind.JSON_SCHEMA, value["value"], f"{param}.value")
        case "json_object":
            return Guide(kind=GuideKind.JSON_OBJECT)
        case "json_schema":
            inner = value.get("json_schema")
            _require(isinstance(inner, dict), f"{param}.json_schema", "an object with a schema", inner)
            if "schema" not in inner:
                raise InvalidRequestError(f"{param}.json_schema has no schema", param=param.partition(".")[0])
            return make_guide(GuideKind.JSON_SCHEMA, inner["schema"], f"{param}.json_schema.schema")
        case "structural_tag":
            return make_guide(GuideKind.STRUCTURAL_TAG, value, param)
        case kind:
            raise InvalidRequestError(
                f"{param}.type is {str(kind)[:80]!r}; it must be text, json_object, json_schema or structural_tag",
                param=param.partition(".")[0],
            )


def _of_structured_outputs(value: Any) -> dict[str, Guide]:
    if value is None:
        return {}
    _require(isinstance(value, dict), "structured_outputs", "an object", value)
    found: dict[str, Guide] = {}
    for name, inner in value.items():
        if inner is None or inner is False:
            continue
        if name not in _VLLM_FIELDS:
            raise InvalidRequestError(
                f"structured_outputs has no {str(name)[:80]!r}; it has {', '.join(_VLLM_FIELDS)}",
                param="structured_outputs",
            )
        found[f"structured_outputs.{name}"] = make_guide(_VLLM_FIELDS[name], inner, f"structured_outputs.{name}")
    return found


def _parsed(text: str, param: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{param} is not JSON: {error}", param=param.partition(".")[0]) from error


def _written(value: Any, param: str) -> str:
    try:
        return json.dumps(value)
    except RecursionError as error:
        raise InvalidRequestError(f"{param} is nested too deeply", param=param.partition(".")[0]) from error


def _require(holds: Any, param: str, wanted: str, value: Any) -> None:
    if not holds:
        raise InvalidRequestError(f"{param} must be {wanted}, not {str(value)[:80]!r}", param=param.partition(".")[0])
