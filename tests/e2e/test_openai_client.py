"""OpenAI's own client, unmodified, against the demo model: its features beyond plain requests, sync and async."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, Field

from kvrelay.launcher.local.deployment import LocalDeployment

from .conftest import wait_until_idle

pytestmark = pytest.mark.timeout(300)

MODEL = "SmolLM2-135M-Instruct"
QUESTION = "What is the capital of France? Answer in one sentence."
CHAT: list[ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION}]


class City(BaseModel):
    """What an answer must look like."""

    name: str = Field(max_length=12)
    kind: Literal["capital", "town"]
    is_large: bool


class Weather(BaseModel):
    """Tell the weather of a city."""

    city: str = Field(max_length=12)
    unit: Literal["celsius", "fahrenheit"]


@pytest.fixture
def client(deployment: LocalDeployment) -> Iterator[openai.OpenAI]:
    """A client of the deployment. All blocks must be free afterwards."""
    with openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="unused", max_retries=0) as client:
        yield client
    wait_until_idle(deployment)


def test_the_streaming_helper(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=24, temperature=0)
    pieces: list[str] = []
    kinds: set[str] = set()
    with client.chat.completions.stream(
        model=MODEL, messages=CHAT, max_tokens=24, temperature=0, stream_options={"include_usage": True}
    ) as stream:
        for event in stream:
            kinds.add(event.type)
            if event.type == "content.delta":
                pieces.append(event.delta)
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert "".join(pieces) == final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.total_tokens == whole.usage.total_tokens


def test_parse(client: openai.OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Describe Paris in JSON."}]
    for fields in ({"temperature": 0}, {"temperature": 1.3, "seed": 3}):
        parsed = client.chat.completions.parse(
            model=MODEL, messages=messages, response_format=City, max_tokens=200, **fields
        )
        assert isinstance(parsed.choices[0].message.parsed, City)
    with client.chat.completions.stream(
        model=MODEL, messages=messages, response_format=City, temperature=0, max_tokens=200
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, City)
    response = client.responses.parse(
        model=MODEL, input="Describe Paris in JSON.", text_format=City, temperature=0, max_output_tokens=200
    )
    assert isinstance(response.output_parsed, City)


def test_tools(client: openai.OpenAI) -> None:
    tools = [openai.pydantic_function_tool(Weather, name="weather")]
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the weather in Paris?"}]
    fields: dict[str, Any] = {"model": MODEL, "tools": tools, "temperature": 0, "max_tokens": 300}
    parsed = client.chat.completions.parse(
        messages=messages, tool_choice="required", parallel_tool_calls=False, **fields
    )
    choice = parsed.choices[0]
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls or []
    assert call.function.name == "weather"
    assert isinstance(call.function.parsed_arguments, Weather)
    named: Any = {"type": "function", "function": {"name": "weather"}}
    arguments = ""
    with client.chat.completions.stream(messages=messages, tool_choice=named, **fields) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                arguments += event.arguments_delta
        final = stream.get_final_completion()
    [streamed] = final.choices[0].message.tool_calls or []
    assert streamed.function.arguments == arguments
    assert isinstance(streamed.function.parsed_arguments, Weather)
    result: list[Any] = [
        *messages,
        {"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": call.function.to_dict()}]},
        {"role": "tool", "tool_call_id": call.id, "content": "It is sunny."},
    ]
    after = client.chat.completions.create(messages=result, tool_choice="none", **fields)
    assert after.choices[0].message.content
    assert not after.choices[0].message.tool_calls


async def test_the_async_client(deployment: LocalDeployment) -> None:
    async with openai.AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="unused", max_retries=0) as client:
        create = client.chat.completions.create
        whole, other = await asyncio.gather(
            create(model=MODEL, messages=CHAT, max_tokens=24, temperature=0),
            create(model=MODEL, messages=CHAT, max_tokens=24, temperature=0, stream=True),
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in other if chunk.choices]
        assert "".join(pieces) == whole.choices[0].message.content
        # The client closes a stream after its first chunk. All blocks must be free afterwards.
        stopped = await create(model=MODEL, messages=CHAT, stream=True, extra_body={"ignore_eos": True})
        async for _ in stopped:
            break
        await stopped.close()
    await asyncio.to_thread(wait_until_idle, deployment)
