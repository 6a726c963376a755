"""Server-sent events as bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrelay.gateway.sse import ChunkTemplate, sse

HEAD: dict[str, Any] = {"id": "cmpl-1", "created": 17, "model": 'a "quoted" \u2028 née', "system_fingerprint": None}


@pytest.mark.parametrize("text", ["", "plain", 'é 🏃 "\\', "line ends: \x85\u2028\u2029\r\n"])
def test_a_template_writes_what_the_whole_body_would_be(text: str) -> None:
    choices = [{"index": 0, "text": text, "finish_reason": None}]
    event = ChunkTemplate(HEAD, "choices").event(choices)
    assert event == sse({**HEAD, "choices": choices})
    data = event.decode().removeprefix("data: ").removesuffix("\n\n")
    assert data.splitlines() == [data]
    assert json.loads(data) == {**HEAD, "choices": choices}
