"""The load of a worker: its last report, and this gateway's changes since then."""

from __future__ import annotations

import random

import pytest

from kvrelay.gateway.workers.load import Load, WorkerView
from kvrelay.wire.messages import Status, WorkerState

BLOCK = 16


def status(running: int = 0, waiting: int = 0, tokens: int = 0, free: int = 100, arriving: int = 0) -> Status:
    return Status(
        state=WorkerState.READY,
        num_running=running,
        num_waiting=waiting,
        num_waiting_tokens=tokens,
        num_free_blocks=free,
        num_blocks=100,
        max_running=64,
        num_arriving=arriving,
    )


def test_what_is_over_counts_no_more() -> None:
    """An ended request leaves the load at once, before the next report."""
    load = Load(BLOCK)
    load.open(("r", 1), 160, 0.0, is_sent=True, num_to_compute=160)
    load.on_status(status(running=3, tokens=1160, free=50), 1.0)
    assert (load.num_requests, load.num_waiting_tokens, load.num_free_blocks(100)) == (3, 1160, 50)
    load.on_first_token(("r", 1), 1.1, None)
    assert load.num_waiting_tokens == 1000
    load.close(("r", 1), 320)
    assert (load.num_requests, load.num_free_blocks(100)) == (2, 70)


def test_what_groups_with_windows_give_back_is_room_for_others() -> None:
    """With Gemma 3's windows a sequence of 32k tokens keeps a quarter of its blocks, and is counted so."""
    windows = (None, *[1024] * 5)
    num_blocks = -(-(2048 + 5 * ((1023 + 2048) // BLOCK + 2)) // 6)
    load = Load(BLOCK, windows)
    load.on_status(status(), 1.0)
    load.open(("r", 1), 2**15, 1.1, is_sent=True, num_to_compute=2**15)
    assert load.num_free_blocks(3000) == 100 - num_blocks
    view = WorkerView("", b"", 3, 0, num_blocks, 3000, BLOCK, windows=windows)
    assert view.takes_sequence(2**15)
    assert not view.takes_sequence(2**15 + 6 * BLOCK)


def test_others_are_what_the_report_has_beyond_our_own() -> None:
    load = Load(BLOCK)
    for index in range(4):
        load.open((f"r{index}", 1), 16, 0.0, is_sent=True, num_to_compute=16)
    load.on_status(status(running=4, waiting=3, tokens=500), 1.0)
    assert (load.num_requests, load.num_waiting_tokens) == (7, 500)
    load.open(("new", 1), 16, 1.1, is_sent=True, num_to_compute=16)
    assert (load.num_requests, load.num_waiting_tokens) == (8, 516)


def test_a_report_may_have_left_before_an_attempt_arrived() -> None:
    load = Load(BLOCK)
    load.open(("r", 1), 160, 1.0, is_sent=True, num_to_compute=160)
    load.on_status(status(free=100), 1.01)
    assert (load.num_requests, load.num_waiting_tokens, load.num_free_blocks(100)) == (1, 160, 90)
    load.on_status(status(running=1, tokens=160, free=90), 2.0)
    assert (load.num_requests, load.num_waiting_tokens, load.num_free_blocks(100)) == (1, 160, 90)


def test_a_decode_worker_hears_of_a_request_from_a_prefill_worker() -> None:
    """A request goes to a decode worker through a prefill worker. It is counted once, before and after the first token."""
    load = Load(BLOCK)
    load.open(("r", 1), 160, 0.0, is_sent=False, num_to_compute=0)
    assert load.num_waiting_tokens == 0, "it computes nothing of the prompt"
    load.on_status(status(), 1.0)
    assert (load.num_requests, load.num_free_blocks(100)) == (1, 90)
    load.on_first_token(("r", 1), 1.5, None)
    load.on_status(status(running=1, free=90), 2.0)
    assert (load.num_requests, load.num_free_blocks(100)) == (1, 90)


def test_a_hand_off_that_a_report_counts_is_nobody_elses() -> None:
    """A report counts a hand-off as arriving. The load does not count it twice."""
    load = Load(BLOCK)
    load.open(("r", 1), 160, 0.0, is_sent=False, num_to_compute=0)
    load.on_status(status(waiting=1, arriving=1), 1.0)
    assert load.num_requests == 1
    load.on_status(status(waiting=3, arriving=2), 2.0)
    assert load.num_requests == 3, "one of two that arrive, and one that waits, are others'"
    load.on_status(status(waiting=1), 3.0)
    assert load.num_requests == 2, "what waits has arrived: it is another's"


def test_what_is_cached_need_not_be_computed_but_needs_its_blocks() -> None:
    load = Load(16)
    load.open(("a", 1), 160, 0.0, is_sent=True, num_to_compute=32)
    assert (load.num_requests, load.num_waiting_tokens, load.num_free_blocks(100)) == (1, 32, 90)


def test_what_is_computed_of_a_prompt_by_the_report_waits_no_more() -> None:
    load = Load(BLOCK)
    load.open(("r", 1), 1000, 0.0, is_sent=True, num_to_compute=1000)
    load.open(("s", 1), 500, 0.0, is_sent=True, num_to_compute=500)
    load.on_status(status(running=2, tokens=900), 1.0)
    assert load.num_waiting_tokens == 900
    assert load.num_waiting_tokens_at(1.5, 400.0) == 700
    assert load.num_waiting_tokens_at(9.0, 400.0) == 0
    load.on_first_token(("r", 1), 1.9, 400.0)
    assert load.num_waiting_tokens == 500
    assert load.num_waiting_tokens_at(2.0, 400.0) == pytest.approx(460)
    load.close(("s", 1), 500)
    assert load.num_waiting_tokens == 0
    load.open(("t", 1), 100, 10.0, is_sent=True, num_to_compute=100)
    assert load.num_waiting_tokens_at(10.0, 400.0) == 100, "who was idle has computed nothing of it"


def test_what_is_to_be_computed_before_a_prompt_has_its_first_token_is_what_came_before_it() -> None:
    load = Load(BLOCK)
    for name in ("a", "b", "c"):
        load.open((name, 1), 1000, 0.0, is_sent=True, num_to_compute=1000)
    assert [load.num_tokens_until((name, 1), 0.0, 500.0) for name in ("a", "b", "c")] == [1000, 2000, 3000]
    load.on_status(status(running=3, tokens=2600), 1.0)
    assert load.num_tokens_until(("b", 1), 1.0, 500.0) == 1600
    assert load.num_tokens_until(("b", 1), 2.0, 500.0) == 1100
    assert load.num_tokens_until(("b", 1), 9.0, 500.0) == 1000, "as far as one knows it has not begun"
    load.on_first_token(("a", 1), 2.0, 500.0)
    assert load.num_tokens_until(("c", 1), 2.0, 500.0) == 2000


def test_a_first_token_does_not_take_back_what_was_computed_of_the_next_prompt() -> None:
    """A worker computes two prompts in turn. The first one's first token does not make the second one's wait longer."""
    load = Load(BLOCK)
    for name in ("a", "b"):
        load.open((name, 1), 1000, 0.0, is_sent=True, num_to_compute=1000)
    load.on_status(status(running=2, tokens=1200), 1.0)
    before = load.num_tokens_until(("b", 1), 1.9, 1000.0)
    load.on_first_token(("a", 1), 1.9, 1000.0)
    assert load.num_tokens_until(("b", 1), 1.9, 1000.0) == pytest.approx(max(before, 1000)), "as far as one knows"
    assert load.num_waiting_tokens_at(1.9, 1000.0) == pytest.approx(300), "200 of the 900 since were the first one's"


def test_a_first_token_from_another_worker_is_no_news_of_what_this_one_computes() -> None:
    load = Load(BLOCK)
    load.open(("local", 1), 1000, 0.0, is_sent=True, num_to_compute=1000)
    load.open(("handed over", 1), 1000, 0.1, is_sent=False, num_to_compute=0)
    load.on_first_token(("handed over", 1), 0.6, 500.0)
    assert load.num_waiting_tokens_at(0.8, 500.0) == pytest.approx(600)


def test_a_place_that_is_kept_is_taken_for_others() -> None:
    load = Load(BLOCK)
    load.open(("r", 2), 160, 0.0, is_sent=False, num_to_compute=100)
    load.on_status(status(), 1.0)
    assert (load.num_requests, load.num_waiting_tokens, load.num_free_blocks(100)) == (1, 100, 90)
    load.close(("r", 2), 0)
    assert (load.num_requests, load.num_waiting_tokens, load.num_free_blocks(100)) == (0, 0, 100)


@pytest.mark.parametrize("seed", range(20))
def test_over_any_story_nothing_is_left_when_all_is_over(seed: int) -> None:
    chance, load, now_s = random.Random(seed), Load(BLOCK), 0.0
    keys: list[tuple[str, int]] = []
    for number in range(300):
        now_s += chance.choice((0.0, 0.01, 0.1))
        key = chance.choice([*keys, ("nobody", 1)])
        match chance.randrange(5):
            case 0 | 1:
                keys.append((f"r{number}", 1))
                num_tokens = chance.randrange(1, 200)
                num_to_compute = chance.randrange(num_tokens + 1)
                is_sent = chance.random() < 0.5
                load.open(keys[-1], num_tokens, now_s, is_sent=is_sent, num_to_compute=num_to_compute)
            case 2:
                load.on_first_token(key, now_s, chance.choice((None, 0.0, 400.0)))
            case 3:
                load.close(key, 7)
                keys = [one for one in keys if one != key]
            case _:
                load.on_status(status(tokens=chance.randrange(500), free=chance.randrange(1000)), now_s)
        assert load.num_requests >= len(keys)
        assert load.num_waiting_tokens >= 0
    for key in keys:
        load.close(key, 7)
    load.on_status(status(free=1000), now_s)
    assert (load.num_requests, load.num_waiting_tokens, load.num_free_blocks(1000)) == (0, 0, 1000)
