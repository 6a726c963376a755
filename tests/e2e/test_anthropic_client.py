"""Anthropic's own client, unmodified, against the demo model: text whole and streamed, a tool, a schema, token
counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel, Field

from kvrelay.launcher.local.deployment import LocalDeployment

from .conftest import wait_until_idle

pytestmark = pytest.mark.timeout(300)

ASKED: Any = {
    "model": "SmolLM2-135M-Instruct",
    "max_tokens": 60,
    "messages": [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
    "extra_body": {"temperature": 0},
}
WEATHER: Any = {
    "name": "weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class City(BaseModel):
    """What an answer must look like."""

    name: str = Field(max_length=12)


@pytest.fixture
def client(deployment: LocalDeployment) -> Iterator[anthropic.Anthropic]:
    """A client of the deployment. All blocks must be free afterwards."""
    with anthropic.Anthropic(base_url=deployment.url, api_key="unused", max_retries=0) as client:
        yield client
    wait_until_idle(deployment)


def test_messages(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**ASKED)
    (block,) = whole.content
    assert block.type == "text"
    assert "Paris" in block.text
    assert whole.stop_reason == "end_turn"
    with client.messages.stream(**ASKED) as stream:
        assert "".join(stream.text_stream) == block.text
    counted = client.messages.count_tokens(model=ASKED["model"], messages=ASKED["messages"])
    assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    called = client.messages.create(**ASKED, tools=[WEATHER], tool_choice={"type": "tool", "name": "weather"})
    assert called.stop_reason == "tool_use"
    assert all(call.type == "tool_use" and list(call.input) == ["city"] for call in called.content)
    assert isinstance(client.messages.parse(**ASKED, output_format=City).parsed_output, City)
    with pytest.raises(anthropic.NotFoundError, match="is not served here"):
        client.messages.create(**{**ASKED, "model": "claude"})
