"""Requests to ``/v1/completions`` with different settings, each with its own prompt, and the comparison of their answers.

A :class:`Wish` is one request. Every request asks for token ids, so that answers are compared exactly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

MAX_TOKENS = 12
SENTENCE = {
    "type": "object",
    "properties": {
        "capital": {"enum": ["Paris", "Rome", "Madrid"]},
        "sure": {"type": "boolean"},
        "letters": {"type": "integer", "enum": [4, 5, 6]},
    },
    "required": ["capital", "sure", "letters"],
    "additionalProperties": False,
}
# SENTENCE as a regex, for a reference without JSON Schema. It matches the only form in which guides write JSON.
SENTENCE_REGEX = r'\{"capital": "(Paris|Rome|Madrid)", "sure": (true|false), "letters": (4|5|6)\}'
DATE_REGEX = r"(19|20)[0-9]{2}-[01][0-9]"
CITY_REGEX = r"city: [A-Z][a-z]{3,8}\."


@dataclass(frozen=True, slots=True)
class Wish:
    """One request. ``fields`` are sent beside the prompt. Generation is greedy unless they say otherwise."""

    prompt: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """The request's body."""
        common = {"max_tokens": MAX_TOKENS, "temperature": 0, "return_token_ids": True}
        return {"prompt": self.prompt, **common, **self.fields}

    @property
    def num_choices(self) -> int:
        """The number of choices in the answer."""
        return int(self.fields.get("n", 1))


def _sampled(prompt: str, seed: int, **fields: Any) -> Wish:
    return Wish(prompt, {"temperature": 1.0, "seed": seed, **fields})


def _beams(prompt: str, width: int) -> Wish:
    return Wish(prompt, {"use_beam_search": True, "n": width})


WISHES: dict[str, Wish] = {
    "greedy": Wish("The capital of France is"),
    "repetition_penalty": Wish("Red, green, red, green, red, green, red,", {"repetition_penalty": 1.4}),
    "presence_penalty": Wish("Count on: one, two, three, one, two, three,", {"presence_penalty": 1.8}),
    "frequency_penalty": Wish("la la la la la la la", {"frequency_penalty": 1.3}),
    "logit_bias": Wish("The largest planet is", {"logit_bias": {"28": 4.5, "260": -100, "281": 2}}),
    "bad_words": Wish("The capital of Italy is", {"bad_words": ["Rome", "a city in"]}),
    "min_tokens": Wish("The capital of Portugal is", {"min_tokens": 9, "stop_token_ids": [30]}),
    "allowed_token_ids": Wish("Digits of pi: 3.", {"allowed_token_ids": list(range(30, 42)), "max_tokens": 8}),
    "logprobs": Wish("Water boils at a temperature of", {"logprobs": 5}),
    "prompt_logprobs": Wish(
        "In 1969 three astronauts flew to the moon, and two of them walked on it. They stayed for less than a day, took "
        "pictures, and brought some stones home. The name of the first one was",
        {"prompt_logprobs": 3},
    ),
    "echo": Wish("Snow is white, grass is", {"echo": True, "logprobs": 2}),
    "stop": Wish("Monday, Tuesday,", {"stop": ["nothing of this", "day, and Th"]}),
    "temperature": _sampled("Once upon a time", 1, temperature=0.7),
    "top_k": _sampled("My favourite animal is", 2, top_k=7),
    "top_p": _sampled("On the table there was", 3, top_p=0.8),
    "min_p": _sampled("He opened the door and", 4, min_p=0.08),
    "typical_p": _sampled("The best thing about summer is", 5, typical_p=0.6),
    "all filters": _sampled(
        "A short poem about the sea:", 6, temperature=1.3, top_k=60, top_p=0.95, min_p=0.01, repetition_penalty=1.1
    ),
    "n": _sampled("Three good names for a cat are", 7, n=4, top_p=0.95),
    "beams 2": _beams("The sun rises in the", 2),
    "beams 4": _beams("To make bread one needs", 4),
    "beams 8": _beams("The first president of the United States", 8),
    "json_schema": Wish(
        "France in JSON: ",
        {
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SENTENCE}},
            "max_tokens": 40,
        },
    ),
    "regex": Wish("The wall came down in ", {"structured_outputs": {"regex": DATE_REGEX}}),
    "choice": Wish("The capital of Japan is", {"structured_outputs": {"choice": ["Paris", "Rome"]}}),
    "grammar": Wish("Of France, the ", {"structured_outputs": {"grammar": 'root ::= "city: " [A-Z] [a-z]{3,8} "."'}}),
}

# One request of each kind, for workers of other shapes, and a long one, during which a worker can be killed.
FEW = {
    name: WISHES[name]
    for name in ("greedy", "frequency_penalty", "prompt_logprobs", "temperature", "json_schema", "beams 4")
}
LONG = Wish("Tell me a story.", {"seed": 3, "temperature": 1.0, "max_tokens": 48, "ignore_eos": True})


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer without the fields that differ between equal requests."""

    prompt_ids: list[int]
    choices: list[dict[str, Any]]
    num_prompt_tokens: int
    num_output_tokens: int

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Answer:
        """Read a response's body."""
        choices: list[dict[str, Any]] = [dict(choice) for choice in body["choices"]]
        prompts = [choice.pop("prompt_token_ids") for choice in choices]
        assert all(prompt == prompts[0] for prompt in prompts)
        usage = body["usage"]
        return cls(prompts[0], choices, usage["prompt_tokens"], usage["completion_tokens"])

    @property
    def outputs(self) -> list[list[int]]:
        """The token ids of each choice."""
        return [choice["token_ids"] for choice in self.choices]


async def ask(client: httpx.AsyncClient, wish: Wish) -> Answer:
    """Send one request and return its answer."""
    response = await client.post("/v1/completions", json=wish.body)
    assert response.status_code == 200, f"{wish}: {response.text}"
    return Answer.of(response.json())


async def ask_alone(url: str, wishes: Mapping[str, Wish]) -> dict[str, Answer]:
    """Send one request at a time."""
    async with httpx.AsyncClient(base_url=url, timeout=240) as client:
        return {name: await ask(client, wish) for name, wish in wishes.items()}


async def ask_together(url: str, wishes: Mapping[str, Wish]) -> dict[str, Answer]:
    """Send all requests at once."""
    limits = httpx.Limits(max_connections=len(wishes))
    async with httpx.AsyncClient(base_url=url, timeout=240, limits=limits) as client:
        answers = await asyncio.gather(*(ask(client, wish) for wish in wishes.values()))
    return dict(zip(wishes, answers, strict=True))


def assert_same(one: Any, other: Any, where: str = "answer") -> None:
    """Compare recursively; floats may differ by 1e-3. A failure names the field."""
    if isinstance(one, float) and isinstance(other, float):
        assert one == pytest.approx(other, abs=1e-3, rel=0), where
    elif isinstance(one, Mapping) and isinstance(other, Mapping):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, Sequence) and isinstance(other, Sequence) and not isinstance(one, str):
        assert len(one) == len(other), where
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{where}[{index}]")
    else:
        assert one == other, where
