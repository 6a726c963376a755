"""Questions to a deployment, and their whole answers, log probabilities included."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

LOGPROB_TOLERANCE = 1e-3
ANSWER_S = 120.0  # the longest time of an answer on a busy machine; a drain waits as long


@dataclass(frozen=True)
class Question:
    """One request body, and its answer without faults."""

    body: dict[str, Any]
    answer: Answer


@dataclass
class Answer:
    """The content of a stream."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None

    def differs(self, other: Answer) -> str | None:
        """The first difference from ``other``, or None."""
        for name in ("text", "token_ids", "finish_reason"):
            if (mine := getattr(self, name)) != (theirs := getattr(other, name)):
                return f"{name} is {mine!r}, was {theirs!r}"
        counts = [(usage or {}).get("completion_tokens") for usage in (self.usage, other.usage)]
        if counts[0] != counts[1] or len(self.logprobs) != len(other.logprobs):
            return f"{counts[0]} tokens and {len(self.logprobs)} log probabilities, were {counts[1]} and {len(other.logprobs)}"
        worst = max((abs(a - b) for a, b in zip(self.logprobs, other.logprobs, strict=True)), default=0.0)
        return f"a log probability is off by {worst:.4f}" if worst > LOGPROB_TOLERANCE else None


class StreamCutError(Exception):
    """The connection to the gateway broke."""


class HonestError(Exception):
    """The gateway reported an error, or ended the stream without [DONE]."""


async def ask(http: httpx.AsyncClient, url: str, body: dict[str, Any]) -> Answer:
    """Send a request and return its whole answer. Raises StreamCutError and HonestError."""
    answer = Answer()
    is_done = False
    try:
        async with http.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}) as response:
            if response.status_code != 200:
                raise HonestError(f"{response.status_code} {(await response.aread()).decode()[:300]}")
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    is_done = True
                elif line.startswith("data: "):
                    _take(json.loads(line[6:]), answer)
    except httpx.TransportError as error:
        raise StreamCutError(type(error).__name__) from error
    if not is_done or answer.finish_reason is None:
        raise HonestError("a silent cut: the stream ended in order, and said neither why nor [DONE]")
    return answer


def _take(chunk: dict[str, Any], answer: Answer) -> None:
    if "error" in chunk:
        raise HonestError(f"in the stream: {chunk['error']}")
    for choice in chunk["choices"]:
        answer.text += choice["text"]
        answer.token_ids += choice.get("token_ids") or []
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        answer.logprobs += [value or 0.0 for value in logprobs]  # a fake engine has none
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
    answer.usage = chunk.get("usage") or answer.usage


def questions(num: int, chance: random.Random, models: Sequence[str]) -> list[dict[str, Any]]:
    """Bodies of ``num`` questions: half greedy and half seeded, of many lengths, some with stop strings or log probabilities.

    Some share a prefix, and some repeat themselves. Each of ``models`` gets two questions in turn.
    """
    topics = [
        "the sea",
        "bread",
        "an old clock",
        "the first snow",
        "a lighthouse",
        "trains",
        "the number seven",
        "rain",
    ]
    bodies: list[dict[str, Any]] = []
    for index in range(num):
        topic = topics[index % len(topics)]
        filler = f"Notes on {topic}: it is known for many things. " * chance.randrange(1, 9)
        body: dict[str, Any] = {
            "model": models[index // 2 % len(models)],
            "prompt": f"{filler}Question {index}: tell me about {topic}.\nAnswer:",
            "max_tokens": chance.randrange(8, 48),
            "min_tokens": 8,  # the demo model would end most answers at once
            "temperature": 0.0 if index % 2 == 0 else 0.9,
            "seed": 1000 + index,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }
        if index % 6 == 0:  # a repetitive prompt, for which drafts are easy
            body["prompt"] = f"Question {index}: " + "red, green, blue, " * chance.randrange(4, 20)
        if index % 2 == 1:
            body["top_p"] = 0.9
        if index % 3 == 0:
            body["logprobs"] = 2
        if index % 5 == 0:
            body["stop"] = [".", "\n\n"]
        bodies.append(body)
    return bodies


async def reference(urls: Sequence[str], bodies: list[dict[str, Any]], num_clients: int, base: str) -> list[Question]:
    """All questions with their answers without faults. Checks that the gateways at ``urls`` answer the same, under load.

    ``base`` is the model's name. All other names are adapters, and each must change an answer.
    """
    room = asyncio.Semaphore(num_clients)
    async with httpx.AsyncClient(timeout=ANSWER_S, trust_env=False) as http:

        async def one(body: dict[str, Any], url: str) -> Answer:
            async with room:
                return await ask(http, url, body)

        firsts, seconds = [await asyncio.gather(*(one(body, url) for body in bodies)) for url in urls]
        plain = await asyncio.gather(*(one({**body, "model": base}, urls[0]) for body in bodies))
    for name in {body["model"] for body in bodies} - {base}:
        its = [index for index, body in enumerate(bodies) if body["model"] == name]
        assert any(firsts[index].differs(plain[index]) for index in its), f"adapter {name!r} changes no answer"
    for body, first, second in zip(bodies, firsts, seconds, strict=True):
        difference = second.differs(first)
        assert difference is None, f"not even without faults the same: {body['prompt'][-60:]!r}: {difference}"
    return [Question(body, answer) for body, answer in zip(bodies, firsts, strict=True)]
