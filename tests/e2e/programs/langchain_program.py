"""A program as users of langchain-openai write it. Prints its results as JSON. Arguments: base URL and model."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Annotated

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

url, model = sys.argv[1:]
common = {"base_url": f"{url}/v1", "api_key": "none", "model": model, "temperature": 0, "max_retries": 0}
chat = ChatOpenAI(**common, max_tokens=100)
question = "What is the capital of France? Answer in one sentence."


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    is_capital: bool


@tool
def weather(city: Annotated[str, Field(max_length=20)]) -> str:
    """Tells the weather of a city."""
    return city


def calls(message: AIMessage) -> list[object]:
    """Name and arguments of each call."""
    return [[call["name"], call["args"]] for call in message.tool_calls]


whole = chat.invoke(question)
streamed = list(chat.stream(question, stream_usage=True))
asked = chat.bind_tools([weather], tool_choice="required").invoke("How is the weather in Paris?")
history = [HumanMessage("How is the weather in Paris?"), asked]
history += [ToolMessage("snow", tool_call_id=call["id"]) for call in asked.tool_calls]
results = {
    "whole": whole.content,
    "usage": whole.usage_metadata,
    "finish_reason": whole.response_metadata["finish_reason"],
    "streamed": "".join(chunk.text for chunk in streamed),
    "streamed_usage": [chunk.usage_metadata for chunk in streamed if chunk.usage_metadata][-1],
    "async": asyncio.run(chat.ainvoke(question)).content,
    "structured": chat.with_structured_output(City, method="json_schema").invoke("Tell me of Paris.").model_dump(),
    "calls": calls(asked),
    "after_calls": chat.bind_tools([weather], tool_choice="none").invoke(history).content,
    "text": OpenAI(**common, max_tokens=5).invoke("The capital of France is"),
}
responses = ChatOpenAI(**common, max_tokens=100, use_responses_api=True)
results["responses"] = responses.invoke(question).text
print(json.dumps(results))
