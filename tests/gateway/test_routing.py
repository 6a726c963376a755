"""Routing policies: pure functions of what workers reported."""

from __future__ import annotations

import dataclasses

import pytest

from kvrelay.gateway.routing import POLICIES, Route, WorkerView, choose_fingerprint, least_loaded, round_robin


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
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", POLICIES.values())
def test_nobody_there_is_no_route(policy: object) -> None:
    assert callable(policy)
    assert policy([view("p")], [], 10, 0) is None
    assert policy([view("p")], [view("d", fingerprint=b"other")], 10, 0) is None
    assert policy([], [view("d")], 10, 0) == Route(None, "d")


@pytest.mark.parametrize("policy", POLICIES.values())
def test_only_workers_whose_kv_fits_are_paired(policy: object) -> None:
    assert callable(policy)
    prefills = [view("p1", fingerprint=b"1"), view("p2", fingerprint=b"2")]
    decodes = [view("d2", fingerprint=b"2"), view("d3", fingerprint=b"3")]
    assert {policy(prefills, decodes, 10, turn) for turn in range(4)} == {Route("p2", "d2")}


def test_round_robin_takes_everybody_in_turn() -> None:
    prefills, decodes = [view("p2"), view("p1")], [view("d1"), view("d2"), view("d3")]
    routes = [round_robin(prefills, decodes, 10, turn) for turn in range(6)]
    assert [route.prefill for route in routes if route] == ["p1", "p2"] * 3
    assert [route.decode for route in routes if route] == ["d1", "d2", "d3"] * 2


def test_the_prefill_worker_with_the_least_to_compute_is_taken() -> None:
    busy, idle = view("p1", num_waiting_tokens=1000), view("p2", num_waiting_tokens=10)
    assert least_loaded([busy, idle], [view("d")], 10, 0) == Route("p2", "d")
    sent = dataclasses.replace(idle, num_waiting_tokens=2010)
    assert least_loaded([busy, sent], [view("d")], 10, 0) == Route("p1", "d")


def test_the_decode_worker_with_room_and_the_least_in_use_is_taken() -> None:
    full = view("d1", num_free_blocks=1)
    half, most = view("d2", num_free_blocks=50), view("d3", num_free_blocks=40)
    assert least_loaded([], [full, half, most], 160, 0) == Route(None, "d2")
    sent = dataclasses.replace(half, num_free_blocks=5)
    assert least_loaded([], [full, sent, most], 160, 0) == Route(None, "d3")
    assert least_loaded([], [full], 160, 0) == Route(None, "d1")  # it will say itself when there is room


def test_a_burst_spreads_over_equal_workers() -> None:
    decodes = {address: view(address) for address in ("d1", "d2", "d3")}
    for turn in range(9):
        route = least_loaded([], list(decodes.values()), 16, turn)
        assert route is not None
        chosen = decodes[route.decode]
        decodes[route.decode] = dataclasses.replace(
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
