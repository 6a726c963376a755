"""A tool that the model calls. Guided sampling makes the arguments fit the schema."""

import json
import os

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageFunctionToolCall, ChatCompletionToolParam

client = OpenAI(base_url=os.environ.get("KVRELAY_URL", "http://127.0.0.1:8000") + "/v1", api_key="none")
model = client.models.list().data[0].id


def weather(city: str, unit: str) -> str:
    """The tool. A real one would ask a weather service."""
    return f"In {city} it is {20 if unit == 'celsius' else 68} degrees {unit}."


tool: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 40},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What is the weather in Paris, in degrees celsius?"}],
    tools=[tool],
    # A small model rarely calls a tool by itself; "auto" leaves it the choice.
    tool_choice={"type": "function", "function": {"name": "weather"}},
    temperature=0,
    max_tokens=100,
)
for call in answer.choices[0].message.tool_calls or []:
    assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    print(f"{call.function.name}({call.function.arguments})")
    print(weather(**json.loads(call.function.arguments)))
