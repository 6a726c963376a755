"""Counts kept up to date, against counts computed afresh."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from kvrelay.engine.sampling.penalties import Penalties
from kvrelay.engine.step.token_counts import TokenCounts
from kvrelay.engine.step.uploads import Joined, Uploader
from tests.engine.conftest import sequence
from tests.engine.sampling.rig import asked


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
        assert kept.entries.tolist() == [list(item) for item in expected.items()]
        token_ids += [draws.randrange(300) for _ in range(draws.randrange(9))]
        kept.update(token_ids)


class Tokens(list[int]):
    """A list that records from which index it is read."""

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
    assert kept.entries.tolist() == [[1, 0], [2, 0], [3, 1], [7, 7]]


def test_a_batch_has_the_entries_of_the_rows_that_ask() -> None:
    one, plain, other = (sequence([5, 6], [], presence_penalty=value) for value in (1.0, 0.0, 0.5))
    one.num_prompt_tokens = other.num_prompt_tokens = 1
    asking, _ = asked([one, plain, other], 9)
    penalties = Penalties.of(asking)
    assert (penalties.num_entries, penalties.row_starts.tolist()) == (2, [0, 1, 1, 2])
    assert [entries.tolist() for entries in penalties.entries] == [[[6, 1]], [[6, 1]]]
    asking.sequences[0].token_ids.append(6)
    assert Penalties.of(asking).entries[0].tolist() == [[6, 2]]
    assert not Penalties.of(asked([plain], 9)[0]).num_entries


def test_an_upload_has_its_own_copy() -> None:
    """The device may still read one step's counts when the next step's are computed."""
    one, other = (sequence([5, 6], [], presence_penalty=1.0) for _ in range(2))
    one.num_prompt_tokens = other.num_prompt_tokens = 1
    asking, _ = asked([one, other], 9)
    (there,) = Uploader(torch.device("cpu")).upload((Joined(Penalties.of(asking).entries),))
    asking.sequences[0].token_ids.append(6)
    Penalties.of(asking)
    assert there.tolist() == [[6, 1], [6, 1]]
