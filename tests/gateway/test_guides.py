"""What a response_format asks for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrelay.common.sampling import Guide, GuideKind
from kvrelay.gateway.errors import InvalidRequestError
from kvrelay.gateway.guides import requested_guide

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
    assert requested_guide(response_format, None, {}) == guide


def test_an_unknown_type_is_named() -> None:
    for response_format in ({"type": "json"}, {"type": "xml"}, {}):
        with pytest.raises(InvalidRequestError, match=r"response_format\.type is"):
            requested_guide(response_format, None, {})
