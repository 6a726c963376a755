"""The map of cached prefixes: which workers it finds, what it forgets, and how often a request is hashed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvrelay.common.block_hash import HashChain
from kvrelay.common.images import ImageSpan, image_digest
from kvrelay.gateway.routing.prefixes import PrefixMap, RequestPrefix

from .test_ways import view

A, B = ("a", 1), ("b", 1)
BLOCK = 16


def chain(*blocks: int) -> list[bytes]:
    """A chain of hashes, one for each number."""
    return HashChain(b"model", 1).hashes_of_all(blocks)


def test_everybody_is_found_with_as_much_as_it_has() -> None:
    known = PrefixMap(100)
    known.record(chain(1, 2, 3), A)
    known.record(chain(1, 2), B)
    known.record(chain(9), B)
    assert known.find(chain(1, 2, 3, 4)) == {A: 3, B: 2}
    assert known.find(chain(1, 7)) == {A: 1, B: 1}
    assert known.find(chain(9, 1)) == {B: 1}
    assert known.find(chain(7)) == known.find([]) == {}


def test_a_gap_ends_a_prefix() -> None:
    known = PrefixMap(100)
    known.record(chain(1, 2, 3), A)
    known.record(chain(1), B)
    known.record(chain(1, 2, 3)[2:], B)  # the block in between is not known
    assert known.find(chain(1, 2, 3)) == {A: 3, B: 1}


def test_what_nobody_used_for_longest_is_forgotten_the_tail_first() -> None:
    known = PrefixMap(4)
    known.record(chain(1, 2), A)
    known.record(chain(8, 9), A)
    known.record(chain(1, 2), A)
    known.record(chain(5), A)
    assert len(known) == 4
    assert known.find(chain(1, 2)) == {A: 2}
    assert known.find(chain(8, 9)) == {A: 1}


def test_a_worker_that_starts_anew_has_nothing() -> None:
    known = PrefixMap(100)
    known.record(chain(1, 2), A)
    known.record(chain(1, 2), B)
    known.record(chain(1), ("a", 2))
    assert known.find(chain(1, 2)) == {("a", 2): 1, B: 2}
    prefix = RequestPrefix(known, range(BLOCK + 1))
    known.record(HashChain(b"f", BLOCK).hashes(range(BLOCK), 1), A)
    assert prefix.cached_tokens([], [view("a", epoch=1)]) == {"a": BLOCK}
    assert prefix.cached_tokens([], [view("a", epoch=2)]) == {}


def test_a_block_has_a_bounded_number_of_holders_the_latest() -> None:
    known = PrefixMap(100)
    for number in range(100):
        known.record(chain(1), (str(number), 1))
    found = known.find(chain(1))
    assert len(found) == 32
    assert ("99", 1) in found
    assert ("0", 1) not in found


def test_a_worker_that_does_not_have_it_is_forgotten() -> None:
    known = PrefixMap(100)
    known.record(chain(1, 2), A)
    known.record(chain(1), B)
    known.forget(chain(1, 2, 3), A)
    assert known.find(chain(1, 2)) == {B: 1}
    assert len(known) == 1


def test_a_request_s_last_token_does_not_count() -> None:
    known = PrefixMap(100)
    RequestPrefix(known, range(2 * BLOCK)).on_cached([], view("a"))
    assert RequestPrefix(known, range(2 * BLOCK)).cached_tokens([], [view("a"), view("b")]) == {"a": BLOCK}
    assert RequestPrefix(known, range(2 * BLOCK + 1)).cached_tokens([], [view("a")]) == {"a": 2 * BLOCK}
    assert RequestPrefix(known, range(2 * BLOCK)).cached_tokens([5], [view("a")]) == {"a": 2 * BLOCK}
    assert RequestPrefix(known, [7, *range(3 * BLOCK)]).cached_tokens([], [view("a")]) == {}


def test_equal_tokens_of_other_images_are_not_the_same() -> None:
    known = PrefixMap(100)
    one, other = (ImageSpan(BLOCK + 1, BLOCK + 2, image_digest(data)) for data in (b"1", b"2"))
    RequestPrefix(known, range(3 * BLOCK), images=[one]).on_cached([], view("a"))
    for images, num_blocks in (([one], 2), ([other], 1), ([], 1)):
        prefix = RequestPrefix(known, range(3 * BLOCK), images=images)
        assert prefix.cached_tokens([], [view("a")]) == {"a": num_blocks * BLOCK}


def test_the_next_turn_finds_prompt_and_output_where_both_are() -> None:
    known = PrefixMap(100)
    prompt, output = list(range(40)), list(range(500, 530))
    first = RequestPrefix(known, prompt)
    first.on_cached([], view("p"))
    first.on_cached([], view("d"))
    first.on_end(output[:-1], view("d"))
    first.on_end(output[:-1], view("other"))  # this worker never had the prompt
    after = RequestPrefix(known, [*prompt, *output, *range(800, 850)])
    views = [view("p"), view("d"), view("other")]
    assert after.cached_tokens([], views) == {"p": 2 * BLOCK, "d": 4 * BLOCK}  # full blocks of 40 and 69 tokens
    assert after.cached_tokens([], [view("p", fingerprint=b"another model")]) == {}


def test_after_a_miss_the_request_trusts_nobody_and_others_do_not_run_into_it() -> None:
    known = PrefixMap(100)
    prompt = list(range(40))
    RequestPrefix(known, prompt).on_cached([], view("d"))
    RequestPrefix(known, prompt).on_cached([], view("e"))
    request = RequestPrefix(known, prompt)
    assert request.cached_tokens([], [view("d"), view("e")]) == {"d": 2 * BLOCK, "e": 2 * BLOCK}
    request.on_miss(view("d"))
    assert request.cached_tokens([], [view("d"), view("e")]) == {}
    assert RequestPrefix(known, prompt).cached_tokens([], [view("d"), view("e")]) == {"e": 2 * BLOCK}
    request.on_cached([], view("d"))  # the next attempt computed it there
    assert RequestPrefix(known, prompt).cached_tokens([], [view("d")]) == {"d": 2 * BLOCK}


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The list of all block hashes that are computed."""
    found: list[bytes] = []

    make = HashChain._behind

    def counted(chain: HashChain, token_ids: list[int]) -> Iterator[bytes]:
        for block_hash in make(chain, token_ids):
            found.append(block_hash)
            yield block_hash

    monkeypatch.setattr(HashChain, "_behind", counted)
    return found


def test_each_block_is_hashed_once(hashed: list[bytes]) -> None:
    known = PrefixMap(100)
    request = RequestPrefix(known, range(100))
    for _ in range(3):  # as often as a waiting request looks for a route
        request.cached_tokens([], [view("p"), view("d")])
    request.on_cached([], view("p"))
    request.on_cached([], view("d"))
    request.on_end(list(range(60)), view("d"))
    made = hashed.copy()
    assert made == HashChain(b"f", BLOCK).hashes([*range(100), *range(60)], 10)


def test_routing_hashes_no_more_than_somebody_has_and_one_block(hashed: list[bytes]) -> None:
    known = PrefixMap(100)
    new = RequestPrefix(known, range(100))
    assert new.cached_tokens([], [view("p"), view("d")]) == {}
    assert len(hashed) == 1
    new.on_cached([], view("p"))
    hashed.clear()
    shares_two = RequestPrefix(known, [*range(2 * BLOCK), *range(500, 600)])
    assert shares_two.cached_tokens([], [view("p"), view("d")]) == {"p": 2 * BLOCK}
    assert len(hashed) == 3
    assert shares_two.cached_tokens([7], [view("p")]) == {"p": 2 * BLOCK}
    assert len(hashed) == 3


def test_without_a_map_nothing_is_hashed_or_known() -> None:
    request = RequestPrefix(None, range(100))
    request.on_cached([], view("p"))
    request.on_end([], view("p"))
    request.on_miss(view("p"))
    assert request.cached_tokens([], [view("p")]) == {}
