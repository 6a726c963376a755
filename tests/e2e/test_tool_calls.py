"""Calls of tools that the demo model writes: guided, so each one parses and its arguments are what the function takes.

The model is far too small to choose well, which is the harder test: nothing but the guide keeps its calls in form.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import openai
import pytest

from kvrelay.launcher.local import LocalDeployment

pytestmark = pytest.mark.timeout(1200)

NUM_ANSWERS = 16  # at once
PARAMETERS: dict[str, Any] = {
    "find_flight": {
        "type": "object",
        "properties": {
            "from": {"type": "string", "maxLength": 12},
            "to": {"type": "string", "enum": ["Zürich", 'New "old" York', "São Paulo"]},
            "passengers": {
                "type": "array",
                "minItems": 1,
                "maxItems": 2,
                "items": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string", "maxLength": 8},
                        "age": {"type": "integer", "maximum": 130},
                    },
                    "required": ["name", "age"],
                    "additionalProperties": False,
                },
            },
            "is_return": {"type": "boolean"},
        },
        "required": ["from", "to", "passengers"],
        "additionalProperties": False,
    },
    "roll": {
        "type": "object",
        "properties": {"sides": {"type": "integer", "minimum": 2, "maximum": 20}},
        "required": ["sides"],
        "additionalProperties": False,
    },
    "stop": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": parameters, "strict": True}}
    for name, parameters in PARAMETERS.items()
]
NAMED: Any = {"type": "function", "function": {"name": "find_flight"}}


async def _calls(client: openai.AsyncOpenAI, number: int) -> list[tuple[str, str]]:
    """Names and arguments of one answer's calls; every other one is streamed, every third one must be of one function."""
    request: Any = {
        "model": "SmolLM2-135M-Instruct",
        "messages": [{"role": "user", "content": f"Request {number}: book a flight, roll a die or stop."}],
        "tools": TOOLS,
        "tool_choice": NAMED if number % 3 == 0 else "required",
        "parallel_tool_calls": False,
        "temperature": 1.0,
        "seed": number,
        "max_tokens": 200,
    }
    if number % 2:
        message = (await client.chat.completions.create(**request)).choices[0]
        assert message.finish_reason == "tool_calls", message
        return [(call.function.name, call.function.arguments) for call in message.message.tool_calls or []]
    calls: dict[int, list[str]] = {}
    async for chunk in await client.chat.completions.create(**request, stream=True):
        for part in chunk.choices[0].delta.tool_calls or []:
            pieces = calls.setdefault(part.index, ["", ""])
            pieces[0] += part.function.name or ""
            pieces[1] += part.function.arguments or ""
    return [(name, arguments) for name, arguments in calls.values()]


async def test_every_call_is_one(deployment: LocalDeployment) -> None:
    called: set[str] = set()

    async def one(client: openai.AsyncOpenAI, number: int) -> None:
        ((name, arguments),) = await _calls(client, number)
        assert name == "find_flight" or number % 3, "another function than the one that was named"
        jsonschema.validate(json.loads(arguments), PARAMETERS[name])
        called.add(name)

    async with openai.AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="x", max_retries=0, timeout=600) as client:
        await asyncio.gather(*(one(client, number) for number in range(NUM_ANSWERS)))
    assert "find_flight" in called
