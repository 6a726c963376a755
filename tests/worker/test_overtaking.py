"""Which prompts overtake a longer one, and with how much of a step."""

from __future__ import annotations

import pytest

from kvrelay.worker.overtaking import overtaking


@pytest.mark.parametrize(
    ("num_left", "num_tokens", "turns"),
    [
        ([], 100, []),
        ([60, 40], 100, []),  # the step finishes both
        ([7000, 100], 100, [(1, 50)]),
        ([7000, 100], 400, [(1, 100)]),
        ([30, 7000, 100], 100, [(2, 35)]),  # the first one is not in anybody's way
        ([7000, 3000, 100, 80, 80], 60, [(3, 30)]),
        ([7000, 3000, 100, 80, 80], 400, [(3, 80), (4, 80), (2, 40)]),
        ([7000, 4000], 100, []),  # alike: both would be late
        ([100, 7000], 50, []),
        ([7000, 100], 1, []),
    ],
)
def test_a_much_shorter_prompt_has_half_of_what_the_one_in_its_way_would_get(
    num_left: list[int], num_tokens: int, turns: list[tuple[int, int]]
) -> None:
    assert overtaking(num_left, num_tokens) == turns


def test_only_those_that_are_allowed_overtake_and_they_get_whole_units() -> None:
    assert overtaking([7000, 100, 50], 64, {1}) == [(1, 32)]
    assert overtaking([7000, 100, 50], 70, None, 16) == [(2, 32)]
    assert overtaking([7000, 100], 20, None, 16) == []
