"""The ids of a request, and bodies that cannot be read."""

from __future__ import annotations

import json

import pytest
from starlette.types import Message

from kvrelay.gateway.apis.openai.bodies import CompletionBody
from kvrelay.gateway.errors import InvalidRequestError
from kvrelay.gateway.http.request import ApiRequest, parse_body


async def receive() -> Message:
    raise AssertionError("nothing is read")


def request(*headers: tuple[bytes, bytes]) -> ApiRequest:
    return ApiRequest({"type": "http", "method": "POST", "path": "/", "headers": list(headers)}, receive)


def test_an_id_from_outside_is_kept_and_never_used_inside() -> None:
    first, second = request((b"x-request-id", b"order-7")), request((b"x-request-id", b"order-7"))
    assert first.request_id == second.request_id == "order-7"
    assert first.internal_id == first.internal_id
    assert first.internal_id.startswith("order-7.")
    assert first.internal_id != second.internal_id


@pytest.mark.parametrize("given", [b"", b"a b", b"x" * 129, b"caf\xe9", b"a\nb"])
def test_what_is_no_id_is_replaced(given: bytes) -> None:
    asked, other = request((b"x-request-id", given)), request()
    assert asked.request_id == asked.internal_id
    assert len(asked.request_id) == 24
    assert asked.request_id != other.request_id


@pytest.mark.parametrize("value", [b'"\xff"', b"1e999", b'{"a": [1e999]}'])
def test_a_value_that_is_no_json_is_refused_also_where_no_field_is_declared(value: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="not valid JSON"):
        parse_body(CompletionBody, None, b'{"prompt": "x", "metadata": %b}' % value)


@pytest.mark.parametrize("text", [r"a\ud800b", r"a\ud83d", r"a\udc00"])
def test_half_of_a_surrogate_pair_is_refused_with_the_rule_that_it_breaks(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"not valid JSON: .*\\ud800 to \\udfff come in pairs"):
        parse_body(CompletionBody, None, b'{"prompt": "%b"}' % text.encode())


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            f'"prompt": {json.dumps(["x"] * 129)}',
            "prompt: List should have at most 128 items after validation, not 129",
        ),
        (
            f'"prompt": {json.dumps([[1]] * 129)}',
            "prompt: List should have at most 128 items after validation, not 129",
        ),
        ('"prompt": [[1], []]', "prompt.1 is an empty list; it must have at least one item"),
        ('"prompt": []', "prompt is an empty list; it must have at least one item"),
        ('"prompt": [1, -1]', "prompt.1: Input should be greater than or equal to 0, not -1"),
        ('"prompt": [[1], ["x"]]', "prompt.1.0: Input should be a valid integer, not 'x'"),
        ('"prompt": null', "prompt: Input should be a valid string or Input should be a valid array, not null"),
        (f'"prompt": "x", "stop": {json.dumps(["x"] * 17)}', "stop: List should have at most 16 items"),
        ('"prompt": "x", "seed": true', "seed: Input should be a valid integer, not true"),
        (f'"prompt": "x", "seed": {"9" * 4000}', "seed: Input should be less than 9223372036854775808, not 999"),
    ],
)
def test_the_complaint_is_about_the_type_that_the_client_meant(fields: str, text: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        parse_body(CompletionBody, None, f"{{{fields}}}".encode())
    assert str(refused.value).startswith(text)
    assert len(str(refused.value)) < 400
