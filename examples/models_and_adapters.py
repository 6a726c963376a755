"""Asks every model and adapter of a server the same question. Try it with

    kvrelay local --model a=demo --model b=demo --alias chat=a:50+b:50

or

    kvrelay local --adapters DIRECTORY
"""

import asyncio
import os

from openai import AsyncOpenAI

QUESTION = "Name a colour."


async def main() -> None:
    """Ask all at the same time. Requests for adapters of one model share its steps."""
    client = AsyncOpenAI(base_url=os.environ.get("KVRELAY_URL", "http://127.0.0.1:8000") + "/v1", api_key="none")
    names = [model.id for model in (await client.models.list()).data]

    async def ask(name: str) -> str:
        answer = await client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=20
        )
        return answer.choices[0].message.content or ""

    answers = await asyncio.gather(*map(ask, names))
    for name, answer in zip(names, answers, strict=True):
        print(f"{name}: {answer.strip()}")
    await client.close()


asyncio.run(main())
