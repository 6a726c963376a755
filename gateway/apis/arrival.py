"""What HTTP tells of a request beside its body."""

from __future__ import annotations

import re

from kvrelay.gateway.apis.docs import SECONDS, TIMEOUT_HEADER
from kvrelay.gateway.errors import InvalidRequestError
from kvrelay.gateway.http.api_request import ApiRequest
from kvrelay.gateway.text.intake import Arrival

_SECONDS = re.compile(SECONDS)


def arrival_of(request: ApiRequest) -> Arrival:
    """Of an HTTP request. Raises InvalidRequestError if its client's own timeout is none."""
    given = request.headers.get(TIMEOUT_HEADER)
    timeout_s = None if given is None else _timeout_s(given)
    return Arrival(request.internal_id, request.received_s, timeout_s, request.min_priority)


def _timeout_s(given: str) -> float:
    """What the client gives the request, in seconds, by its header. Raises InvalidRequestError."""
    if _SECONDS.fullmatch(given.strip()) is None or float(given) <= 0:
        raise InvalidRequestError(
            f"{TIMEOUT_HEADER} is {given[:80]!r}; it must be a number of seconds above 0, such as 30 or 2.5",
            param=TIMEOUT_HEADER,
        )
    return float(given)
