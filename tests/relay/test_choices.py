"""Several choices of one prompt, through the whole relay: the prompt is computed once, and each choice samples by itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvrelay.engine.fake.step import Share

from .http_gateway import deployment

BLOCK_SIZE = 4  # of the fake card
PROMPT = list(range(3, 45))
SEEDED = {"prompt": PROMPT, "seed": 7, "ignore_eos": True, "return_token_ids": True, "max_tokens": 12}


class Counter:
    """Counts the prompt tokens that a worker computes."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0

    def __call__(self, rows: Sequence[Share]) -> None:
        for row in rows:
            prompt_left = row.sequence.num_prompt_tokens - row.row.start
            self.num_prompt_tokens += max(0, min(row.num_tokens, prompt_left))


async def test_a_prompt_is_computed_once_for_all_its_choices(model: Path) -> None:
    prefill, decode = Counter(), Counter()
    async with deployment(model, gate=decode, prefill_gate=prefill) as up:
        body = (await up.client.post("/v1/completions", json={**SEEDED, "n": 4})).json()
        outputs = [tuple(choice["token_ids"]) for choice in body["choices"]]
        assert len(set(outputs)) == 4, "each choice has its own noise"
        assert all(len(output) == 12 for output in outputs)
        assert body["usage"]["prompt_tokens"] == len(PROMPT)
        assert prefill.num_prompt_tokens == len(PROMPT)
        assert 0 < decode.num_prompt_tokens <= 3 * BLOCK_SIZE, "the others compute no more than the last block"
        await up.settled()
        again = (await up.client.post("/v1/completions", json={**SEEDED, "n": 4})).json()
        assert [tuple(choice["token_ids"]) for choice in again["choices"]] == outputs


async def test_choices_are_the_same_however_they_are_computed(model: Path) -> None:
    answers: list[Any] = []
    for hands_over, num in ((True, 3), (False, 3), (True, 2)):
        async with deployment(model, hands_over=hands_over) as up:
            body = (await up.client.post("/v1/completions", json={**SEEDED, "n": num})).json()
            answers.append([choice["token_ids"] for choice in body["choices"]])
            await up.settled()
    assert answers[0] == answers[1], "over the hand-off and without"
    assert answers[2] == answers[0][:2], "whatever the number of choices"


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_choices_that_end_before_there_is_anything_to_share(model: Path, max_tokens: int) -> None:
    """The first choice may end before its blocks can be shared. The other choices get all their tokens, too."""
    async with deployment(model) as up:
        fields = {**SEEDED, "max_tokens": max_tokens, "n": 3}
        body = (await up.client.post("/v1/completions", json=fields)).json()
        assert [len(choice["token_ids"]) for choice in body["choices"]] == [max_tokens] * 3
        await up.settled()


async def test_a_client_that_leaves_takes_all_its_choices_along(model: Path) -> None:
    async with deployment(model) as up:
        fields = {**SEEDED, "max_tokens": 400, "n": 4, "stream": True}
        async with up.client.stream("POST", "/v1/completions", json=fields) as response:
            assert response.status_code == 200
            seen: set[str] = set()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    seen.add(line.split('"index":')[1][0])
                if len(seen) == 4:
                    break
        await up.settled()
