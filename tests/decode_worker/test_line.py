"""Which waiting sequences join the next step, and which prompt is computed first."""

from __future__ import annotations

from kvrelay.common.sampling import BeamSearch, SamplingParams
from kvrelay.decode_worker.line import Line, look_at, shares
from kvrelay.engine.step.sequence import Sequence


def waiting(name: str, *, has_blocks: bool, width: int | None = None) -> Sequence:
    search = None if width is None else BeamSearch(width=width)
    sampling = SamplingParams(max_tokens=9, temperature=0.0, beam_search=search)
    return Sequence(name, 1, [1, 2], 2, sampling, 0.0, block_tables=[[0]] if has_blocks else [])


def test_complete_ones_join_and_the_oldest_prompt_keeps_its_place() -> None:
    first, second = waiting("p1", has_blocks=False), waiting("p2", has_blocks=False)
    one, two = waiting("c1", has_blocks=True), waiting("c2", has_blocks=True)
    line = [first, one, second, two]
    assert look_at(line, 3) == Line([one, two], first, has_places=True)
    assert look_at(line, 2) == Line([one], first, has_places=True)
    assert look_at(line, 1) == Line([], first, has_places=True)
    assert look_at(line, 0) == Line([], None, has_places=False)
    assert look_at([one, first], 1) == Line([one], None, has_places=False)
    assert look_at([], 4) == Line([], None, has_places=False)
    assert look_at([one, two], 4) == Line([one, two], None, has_places=False)


def test_a_search_keeps_its_places_from_younger_ones() -> None:
    search, one, prompt = (
        waiting("s", has_blocks=False, width=3),
        waiting("c", has_blocks=True),
        waiting("p", has_blocks=False),
    )
    assert look_at([search, one, prompt], 4) == Line([one], search, has_places=True)
    # The search keeps all free places, which are not enough yet.
    assert look_at([search, one, prompt], 2) == Line([], search, has_places=False)
    assert look_at([search, one, prompt], 3) == Line([], search, has_places=True)


def test_a_complete_search_waits_for_all_its_places() -> None:
    search, prompt = waiting("s", has_blocks=True, width=3), waiting("p", has_blocks=False)
    assert look_at([search, prompt], 2) == Line([], None, has_places=False)
    assert look_at([search, prompt], 3) == Line([search], None, has_places=False)
    assert look_at([search, prompt], 4) == Line([search], prompt, has_places=True)


def test_what_one_does_not_take_is_the_next_ones() -> None:
    assert shares([30, 7000, 100, 5], 100) == [30, 65, 0, 5]
    assert shares([30, 40], 100) == [30, 40]
    assert shares([30, 40, 50], 60) == [30, 30, 0]
    assert shares([7000, 10], 0) == [0, 0]
    assert shares([], 10) == []
