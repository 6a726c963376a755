"""Routing policies: pure functions of what workers reported."""

from __future__ import annotations

import msgspec
import pytest

from kvrelay.gateway.routing.ways import Route, choose
from kvrelay.gateway.workers.load import WorkerView, choose_fingerprint

NOTHING: dict[str, int] = {}


def view(address: str, **changes: object) -> WorkerView:
    base = WorkerView(
        address=address,
        fingerprint=b"f",
        num_requests=0,
        num_waiting_tokens=0,
        num_free_blocks=100,
        num_blocks=100,
        block_size=16,
    )
    return msgspec.structs.replace(base, **changes)  # type: ignore[arg-type]


def test_nobody_there_is_no_route() -> None:
    assert choose([view("p")], [], 10, 0, NOTHING) is None
    assert choose([view("p")], [view("d", fingerprint=b"other")], 10, 0, NOTHING) is None
    assert choose([], [view("d")], 10, 0, NOTHING) == Route(None, "d")


def test_only_workers_whose_kv_fits_are_paired() -> None:
    prefills = [view("p1", fingerprint=b"1"), view("p2", fingerprint=b"2")]
    decodes = [view("d2", fingerprint=b"2"), view("d3", fingerprint=b"3")]
    assert {choose(prefills, decodes, 10, turn, NOTHING) for turn in range(4)} == {Route("p2", "d2")}


def test_the_prefill_worker_with_the_least_to_compute_is_taken() -> None:
    busy, idle = view("p1", num_waiting_tokens=1000), view("p2", num_waiting_tokens=10)
    assert choose([busy, idle], [view("d")], 10, 0, NOTHING) == Route("p2", "d")
    sent = msgspec.structs.replace(idle, num_waiting_tokens=2010)
    assert choose([busy, sent], [view("d")], 10, 0, NOTHING) == Route("p1", "d")


def test_the_decode_worker_with_room_and_the_least_in_use_is_taken() -> None:
    full = view("d1", num_free_blocks=1)
    half, most = view("d2", num_free_blocks=50), view("d3", num_free_blocks=40)
    assert choose([], [full, half, most], 160, 0, NOTHING) == Route(None, "d2")
    sent = msgspec.structs.replace(half, num_free_blocks=5)
    assert choose([], [full, sent, most], 160, 0, NOTHING) == Route(None, "d3")
    assert choose([], [full], 160, 0, NOTHING) == Route(None, "d1")  # it will say itself when there is room


def test_a_decode_worker_that_computes_prompts_is_left_to_them() -> None:
    computing, other = view("d1", num_waiting_tokens=160), view("d2", num_free_blocks=61)
    assert choose([view("p")], [computing, other], 16, 0, NOTHING) == Route("p", "d2")
    assert choose([view("p")], [computing, view("d2", num_free_blocks=59)], 16, 0, NOTHING) == Route("p", "d1")


def test_a_burst_spreads_over_equal_workers() -> None:
    decodes = {address: view(address) for address in ("d1", "d2", "d3")}
    for turn in range(9):
        route = choose([], list(decodes.values()), 16, turn, NOTHING)
        assert route is not None
        chosen = decodes[route.decode]
        decodes[route.decode] = msgspec.structs.replace(
            chosen, num_requests=chosen.num_requests + 1, num_free_blocks=chosen.num_free_blocks - 1
        )
    assert [one.num_requests for one in decodes.values()] == [3, 3, 3]


@pytest.mark.parametrize(
    ("current", "prefills", "decodes", "chosen"),
    [
        (None, [], [], None),
        (b"a", [], [], b"a"),  # everybody is away: who comes back was here before
        (None, [b"a"], [b"b"], b"b"),
        (None, [b"a", b"a", b"b"], [b"b"], b"b"),  # the only one with both
        (None, [], [b"a", b"b", b"b"], b"b"),
        (b"a", [b"a", b"b", b"b"], [b"a", b"b", b"b"], b"a"),  # stays while it can serve
        (b"a", [b"b", b"b"], [b"a", b"b"], b"b"),  # goes over when it cannot
        (b"a", [b"b"], [b"a"], b"a"),
    ],
)
def test_the_layout_in_use(current: bytes | None, prefills: list[bytes], decodes: list[bytes], chosen: bytes) -> None:
    assert choose_fingerprint(current, prefills, decodes) == chosen


def test_a_prompt_is_taken_where_it_would_be_computed_soon() -> None:
    assert view("p").takes_prompt(2.0), "nothing is known of its speed"
    assert view("p", num_waiting_tokens=10**6).takes_prompt(2.0)
    assert view("p", num_waiting_tokens=1000, tokens_per_s=500.0).takes_prompt(2.0)
    assert not view("p", num_waiting_tokens=1001, tokens_per_s=500.0).takes_prompt(2.0)
    assert view("p", tokens_per_s=500.0).takes_prompt(0.0), "nothing waits there"


def test_a_sequence_is_taken_where_it_has_blocks_and_a_place_before_long() -> None:
    assert view("d", num_requests=10**6).takes_sequence(160), "how many it runs is not known"
    assert view("d", num_requests=83, max_running=64).takes_sequence(160)
    assert not view("d", num_requests=84, max_running=64).takes_sequence(160)
    assert not view("d", num_requests=1, num_free_blocks=9).takes_sequence(160)
    assert view("d", num_requests=0, num_free_blocks=9).takes_sequence(160), "what nobody else holds is cache"


def test_a_prefix_is_worth_as_many_waiting_tokens_as_it_spares() -> None:
    idle, busy = view("p1"), view("p2", num_waiting_tokens=300)
    assert choose([idle, busy], [view("d")], 501, 0, {"p2": 320}) == Route("p2", "d")
    assert choose([idle, busy], [view("d")], 501, 0, {"p2": 288}) == Route("p1", "d")


@pytest.mark.parametrize(
    ("num_used", "other_used", "chosen"),
    [
        (0, 0, "d2"),
        (49, 0, "d2"),  # 10 cached blocks are worth 40, and a quarter more
        (51, 0, "d1"),
        (90, 40, "d2"),
        (95, 35, "d1"),
        (0, 99, "d2"),
    ],
)
def test_a_decode_worker_may_have_more_in_use_and_still_get_its_chat_back(
    num_used: int, other_used: int, chosen: str
) -> None:
    def using(address: str, num_blocks: int) -> WorkerView:
        return view(address, num_blocks=1000, num_free_blocks=1000 - num_blocks)

    decodes = [using("d1", other_used), using("d2", num_used)]
    assert choose([view("p")], decodes, 162, 0, {"d2": 160}) == Route("p", chosen)


def test_a_prefix_gives_no_room() -> None:
    cached = {"d2": 480}
    decodes = [view("d1", num_free_blocks=40), view("d2", num_free_blocks=30)]
    assert choose([view("p")], decodes, 501, 0, cached) == Route("p", "d1")
    decodes = [view("d1", num_requests=3, max_running=4), view("d2", num_requests=4, max_running=4)]
    assert choose([view("p")], decodes, 501, 0, cached) == Route("p", "d1"), "it would wait for a place in the batch"


def test_a_shared_prompt_does_not_fill_one_worker() -> None:
    """A thousand requests with a system prompt of 512 tokens in common; who was sent one has it."""
    views = {address: view(address, num_blocks=10_000, num_free_blocks=10_000) for address in ("d1", "d2", "d3")}
    holders: dict[str, int] = {}
    for turn in range(1000):
        route = choose([view("p")], list(views.values()), 641, turn, holders)
        assert route is not None
        one = views[route.decode]
        views[route.decode] = msgspec.structs.replace(one, num_free_blocks=one.num_free_blocks - 10)
        holders[route.decode] = 512
        in_use = [one.num_blocks - one.num_free_blocks for one in views.values()]
        assert max(in_use) <= 1.25 * (min(in_use) + 4 * 32) + 10
