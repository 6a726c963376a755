"""What endpoints see of a request: its headers, its ids."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.types import Message

from kvrelay.gateway.api_request import ApiRequest


async def receive() -> Message:
    raise AssertionError("nothing is read")


def request(*headers: tuple[bytes, bytes]) -> ApiRequest:
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "headers": list(headers)}
    made = ApiRequest(scope, receive)
    assert scope["state"] == {"request_id": made.request_id}
    return made


def test_the_first_of_a_repeated_header_counts() -> None:
    asked = request((b"a", b"1"), (b"b", b"\xe9"), (b"a", b"2"))
    assert (asked.field(b"a"), asked.field(b"b"), asked.field(b"c")) == ("1", "é", None)
    assert asked.headers["a"] == "1"


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
