"""The drafter that looks n-grams up, compared with a search through the whole text."""

from __future__ import annotations

import random

import pytest

from kvrelay.decode_worker.ngram import NgramDrafter
from kvrelay.engine.step.sequence import Sequence
from tests.engine.conftest import sequence


def found_by_search(token_ids: list[int], max_tokens: int) -> tuple[int, ...]:
    """The tokens that the drafter's docstring promises, found by a plain search."""
    for length in (4, 2):
        for place in range(len(token_ids) - 1, length - 1, -1):
            if token_ids[place - length : place] == token_ids[-length:]:
                text = list(token_ids)
                while len(text) < len(token_ids) + max_tokens:
                    text.append(text[place + len(text) - len(token_ids)])
                return tuple(text[len(token_ids) :])
    return ()


@pytest.mark.parametrize("seed", range(10))
def test_what_came_behind_the_latest_place_of_the_last_tokens_is_proposed(seed: int) -> None:
    draws = random.Random(seed)
    drafter, texts = NgramDrafter(), [sequence([draws.randrange(3)], []) for _ in range(3)]
    num_found = 0
    for _ in range(300):
        one = draws.choice(texts)
        one.token_ids += [draws.randrange(3) for _ in range(draws.choice((1, 1, 1, 5)))]
        proposed = drafter.foresee(one, most := draws.randint(1, 9))
        assert proposed == found_by_search(one.token_ids, most)
        num_found += bool(proposed)
    assert num_found > 100


def quoted(num_between: int) -> Sequence:
    """A sequence that begins with five tokens and, after others, ends with the first three of them."""
    return sequence([1, 2, 3, 4, 5, *range(10, 10 + num_between), 1, 2, 3], [])


def test_the_longer_match_is_taken() -> None:
    assert NgramDrafter().foresee(sequence([1, 2, 3, 4, 5, 3, 4, 6, 1, 2, 3, 4], []), 1) == (5,)


def test_what_lies_far_behind_is_forgotten() -> None:
    assert NgramDrafter().foresee(quoted(8_000), 2) == (4, 5)
    assert NgramDrafter().foresee(quoted(20_000), 2) == ()
    drafter, one = NgramDrafter(), quoted(0)
    for token_id in range(10, 30_000):  # as it generates
        one.token_ids.append(token_id)
        drafter.foresee(one, 1)
    (indices,) = drafter._indices.values()
    for index in indices:
        assert len(index._newer) + len(index._older) <= 2**14


def test_a_sequence_that_ends_leaves_nothing() -> None:
    drafter, one = NgramDrafter(), quoted(3)
    drafter.foresee(one, 2)
    drafter.forget(one)
    drafter.forget(one)
    assert not drafter._indices
