"""Counts that are kept against counts that are made anew."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvrelay.engine.penalties import Penalties
from kvrelay.engine.token_counts import TokenCounts
from tests.engine.conftest import sequence


@pytest.mark.parametrize("counts_prompt", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_kept_counts_are_those_of_all_tokens(seed: int, counts_prompt: bool) -> None:
    draws = random.Random(seed)
    prompt = [draws.randrange(300) for _ in range(draws.randrange(1, 200))]
    token_ids = prompt + [draws.randrange(300) for _ in range(draws.randrange(3))]
    kept = TokenCounts(token_ids, len(prompt), counts_prompt=counts_prompt)
    for _ in range(100):
        expected = dict.fromkeys(prompt, 0) if counts_prompt else {}
        expected |= Counter(token_ids[len(prompt) :])
        assert kept.tokens.tolist() == list(expected)
        assert kept.counts.tolist() == list(expected.values())
        token_ids += [draws.randrange(300) for _ in range(draws.randrange(9))]
        kept.update(token_ids)


class Tokens(list[int]):
    """Notes from where on it was read."""

    def __init__(self, token_ids: list[int]) -> None:
        super().__init__(token_ids)
        self.read_from: list[int] = []

    def __getitem__(self, index: slice) -> list[int]:  # type: ignore[override]
        self.read_from.append(index.start or 0)
        return super().__getitem__(index)


def test_a_step_reads_its_new_tokens_only() -> None:
    token_ids = Tokens([1, 2, 3])
    kept = TokenCounts(token_ids, 2, counts_prompt=True)
    for length in range(3, 10):
        token_ids.read_from.clear()
        token_ids.append(7)
        kept.update(token_ids)
        assert token_ids.read_from == [length]
    assert dict(zip(kept.tokens.tolist(), kept.counts.tolist(), strict=True)) == {1: 0, 2: 0, 3: 1, 7: 7}


def test_a_batch_has_its_own_copy() -> None:
    """The device may not have read one step's counts when the next step's are made."""
    one, other = (sequence([5, 6], [], presence_penalty=1.0) for _ in range(2))
    one.num_prompt_tokens = other.num_prompt_tokens = 1
    before = Penalties.of([one, other])
    one.token_ids.append(6)
    after = Penalties.of([one])
    assert (before.entry_tokens.tolist(), before.entry_counts.tolist()) == ([6, 6], [1, 1])
    assert (after.entry_tokens.tolist(), after.entry_counts.tolist()) == ([6], [2])
