"""A conversation with streamed answers. Usage: chat.py [QUESTION ...]"""

import os
import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

client = OpenAI(base_url=os.environ.get("KVRELAY_URL", "http://127.0.0.1:8000") + "/v1", api_key="none")
model = client.models.list().data[0].id
questions = sys.argv[1:] or ["What is the capital of France?", "And of Italy?"]

messages: list[ChatCompletionMessageParam] = []
for question in questions:
    print(f"> {question}")
    messages.append({"role": "user", "content": question})
    answer = ""
    stream = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=200, stream=True)
    for chunk in stream:
        text = chunk.choices[0].delta.content or ""
        print(text, end="", flush=True)
        answer += text
    print()
    messages.append({"role": "assistant", "content": answer})
