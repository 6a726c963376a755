"""A program as users of litellm write it. Prints its results as JSON. Arguments: base URL and model."""

from __future__ import annotations

import asyncio
import json
import sys

import litellm

url, model = sys.argv[1:]
question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
common = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 60}
city = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
weather = {"type": "function", "function": {"name": "weather", "parameters": city}}
schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": city, "strict": True}}

whole = litellm.completion(messages=question, **common)
streamed = litellm.completion(messages=question, stream=True, **common)
called = litellm.completion(messages=question, tools=[weather], tool_choice="required", **common)
guided = litellm.completion(messages=question, response_format=schema, **common)
text = litellm.text_completion(
    model=f"text-completion-openai/{model}",
    api_base=f"{url}/v1",
    api_key="none",
    prompt="The capital of France is",
    temperature=0,
    max_tokens=5,
)
try:
    litellm.completion(messages=question, **{**common, "temperature": 7.0})
    refused = None
except litellm.BadRequestError as error:
    refused = str(error)
call = called.choices[0].message.tool_calls[0].function
print(
    json.dumps(
        {
            "whole": whole.choices[0].message.content,
            "completion_tokens": whole.usage.completion_tokens,
            "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in streamed),
            "async": asyncio.run(litellm.acompletion(messages=question, **common)).choices[0].message.content,
            "call": [call.name, json.loads(call.arguments)],
            "schema": json.loads(guided.choices[0].message.content),
            "text": text.choices[0].text,
            "refused": refused,
        }
    )
)
