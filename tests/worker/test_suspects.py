"""The sequence that breaks a step is found by steps with fewer sequences, and no other one is blamed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.worker.scheduling.suspects import Key, Suspects


@given(st.integers(1, 600), st.data())
def test_only_who_breaks_a_step_alone_is_blamed_and_others_compute_again(num_keys: int, data: st.DataObject) -> None:
    keys = [(f"r{index}", 1) for index in range(num_keys)]
    guilty = set(data.draw(st.lists(st.sampled_from(keys), max_size=3, unique=True)))
    suspects = Suspects()
    found: set[Key | None] = {suspects.blame(keys)} - {None}
    cleared: set[Key] = set()
    num_steps = num_in_a_row = most_in_a_row = 0
    while (group := suspects.group) is not None:
        num_steps += 1
        if group & guilty:
            found |= {suspects.blame(sorted(group))} - {None}
            num_in_a_row += 1
            most_in_a_row = max(num_in_a_row, most_in_a_row)
        else:
            suspects.clear()
            cleared |= group
            num_in_a_row = 0
    assert found == (guilty if guilty or num_keys > 1 else set(keys))
    assert cleared == (set(keys) - guilty if num_keys > 1 else set())
    assert num_steps <= 2 * 10 * max(1, len(guilty)) + 2
    if len(guilty) == 1:
        assert most_in_a_row <= 2  # the model loop gives up after ten
