"""Request bodies: from bytes to a validated model in one pass, and complaints that name the field, its value and the limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from kvrelay.gateway.errors import InvalidRequestError

Body = TypeVar("Body", bound=BaseModel)


class Described(BaseModel):
    """What ``/openapi.json`` describes; the docstring below a field is the field's description there."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class RequestBody(Described):
    """What a client sends. Types are checked strictly; fields that nobody knows are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


def parse_body(model: type[Body], content_type: str | None, body: bytes) -> Body:
    """``body`` as ``model``. Raises InvalidRequestError."""
    media_type = "application/json" if content_type is None else content_type.partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise InvalidRequestError(f"the body is {media_type[:80]!r} by its header; send content-type: application/json")
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _complaint(error.errors(include_url=False)) from error


def _complaint(complaints: Sequence[ErrorDetails]) -> InvalidRequestError:
    """The most telling one, naming the field, its value and what is allowed."""
    if complaints[0]["type"] == "json_invalid":
        reason = complaints[0].get("ctx", {}).get("error", complaints[0]["msg"])
        return InvalidRequestError(f"the body is not valid JSON: {reason}")
    # A field of several types complains once per type; the type that fits best got the furthest into the value.
    deepest = max(len(complaint["loc"]) for complaint in complaints)
    chosen = [complaint for complaint in complaints if len(complaint["loc"]) == deepest]
    names = [str(part) for part in chosen[0]["loc"] if not _is_type_name(part)]
    value = chosen[0].get("input")
    if value == [] and chosen[0]["type"] == "too_short":
        return InvalidRequestError(
            f"{'.'.join(names)} is an empty list; it must have at least one item", param=names[0]
        )
    messages = " or ".join(
        dict.fromkeys(complaint["msg"] for complaint in chosen[:4] if complaint["loc"][:-1] == chosen[0]["loc"][:-1])
    )
    shown = "" if isinstance(value, dict | list) or chosen[0]["type"] == "missing" else f", not {str(value)[:80]!r}"
    return InvalidRequestError(f"{'.'.join(names) or 'body'}: {messages}{shown}", param=names[0] if names else "body")


def _is_type_name(part: object) -> bool:
    """Whether a part of a location names a type of a union, and not a field."""
    return isinstance(part, str) and (part in ("str", "int") or "[" in part or "constrained" in part)
