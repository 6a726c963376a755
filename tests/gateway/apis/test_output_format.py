"""What a response_format asks for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrelay.common.sampling import Guide, GuideKind
from kvrelay.gateway.apis.openai.output_format import RequestedGuide, format_guide, requested_guide
from kvrelay.gateway.errors import InvalidRequestError

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
OF_SCHEMA = Guide(kind=GuideKind.JSON_SCHEMA, text=json.dumps(SCHEMA))


@pytest.mark.parametrize(
    ("response_format", "guide"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, Guide(kind=GuideKind.JSON_OBJECT)),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, OF_SCHEMA),
        ({"type": "json_object", "value": SCHEMA}, OF_SCHEMA),  # as Hugging Face's InferenceClient writes it
        ({"type": "json", "value": SCHEMA}, OF_SCHEMA),  # as TGI does
    ],
)
def test_a_response_format(response_format: Any, guide: Guide | None) -> None:
    requested = requested_guide(response_format, None, {})
    assert requested == (None if guide is None else RequestedGuide(guide, "response_format"))


@pytest.mark.parametrize(
    ("structured_outputs", "fields", "param"),
    [
        ({"regex": "a"}, {}, "structured_outputs.regex"),
        ({"json": SCHEMA, "choice": None}, {}, "structured_outputs.json"),
        (None, {"guided_choice": ["a"]}, "guided_choice"),
    ],
)
def test_the_field_that_a_guide_came_from(structured_outputs: Any, fields: dict[str, Any], param: str) -> None:
    requested = requested_guide(None, structured_outputs, fields)
    assert requested is not None
    assert requested.param == param


def test_an_unknown_type_is_named() -> None:
    for response_format in ({"type": "json"}, {"type": "xml"}, {}):
        with pytest.raises(InvalidRequestError, match=r"response_format\.type is"):
            requested_guide(response_format, None, {})


def test_another_field_than_response_format_is_named() -> None:
    for value in ({"type": "bogus"}, 5):
        with pytest.raises(InvalidRequestError, match=r"text\.format") as refused:
            format_guide(value, "text.format")
        assert refused.value.param == "text"


def test_what_is_nested_beyond_what_can_be_written_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"properties": {"a": deep}}
    for value in (deep, '{"properties":{"a":' * 5000 + "1" + "}}" * 5000):
        with pytest.raises(InvalidRequestError, match="guided_json is"):
            requested_guide(None, None, {"guided_json": value})
