"""The choice of workers for a request, and of the way of its prompt, as pure functions of workers' reports."""

from __future__ import annotations

import msgspec
import pytest

from kvrelay.gateway.routing.ways import Limits, Reason, Route, Way, choose, choose_way
from kvrelay.gateway.workers.load import WorkerView, choose_fingerprint

LIMITS = Limits(prefill_backlog_s=2.0, local_backlog_s=2.0)
HANDED_OVER, LOCAL = Route("p", "d"), Route(None, "d")


def worker(address: str, tokens_per_s: float | None = 1000.0, num_waiting_tokens: int = 0, **more: int) -> WorkerView:
    base = WorkerView(
        address=address,
        fingerprint=b"f",
        num_requests=0,
        num_waiting_tokens=num_waiting_tokens,
        num_free_blocks=1000,
        num_blocks=1000,
        block_size=16,
        tokens_per_s=tokens_per_s,
    )
    return msgspec.structs.replace(base, **more)


def way(prefill: WorkerView, decode: WorkerView, num_tokens: int, limits: Limits = LIMITS, **cached: int) -> Way | None:
    return choose_way([prefill], [decode], num_tokens, 0, cached, limits)


@pytest.mark.parametrize(("num_tokens", "route"), [(1, LOCAL), (16, LOCAL), (89, LOCAL), (90, HANDED_OVER)])
def test_on_idle_pools_a_short_prompt_spares_the_hand_off(num_tokens: int, route: Route) -> None:
    """A hand-off costs 10 ms, and local prefill must be sooner by a tenth. At 1,000 tokens a second 89 tokens stay local."""
    assert way(worker("p"), worker("d"), num_tokens) == (route, Reason.SOONER)


def test_a_long_prompt_of_which_the_decode_worker_lacks_little_is_computed_there() -> None:
    assert way(worker("p"), worker("d"), 5000, d=4960) == (LOCAL, Reason.SOONER)
    assert way(worker("p"), worker("d"), 5000, d=4960, p=4960) == (LOCAL, Reason.SOONER)
    assert way(worker("p"), worker("d"), 5000, p=4960) == (HANDED_OVER, Reason.SOONER)


def test_what_waits_counts_at_the_speed_at_which_it_is_computed() -> None:
    """A decode worker at 250 tokens per second takes 0.8 s for 200 tokens. The waiting tokens decide which way is sooner."""
    busy = worker("d", 250.0)
    assert way(worker("p", num_waiting_tokens=600), busy, 200) == (HANDED_OVER, Reason.SOONER)
    assert way(worker("p", num_waiting_tokens=700), busy, 200) == (LOCAL, Reason.SOONER)
    waits = worker("d", 250.0, num_waiting_tokens=100)
    assert way(worker("p", num_waiting_tokens=700), waits, 200) == (HANDED_OVER, Reason.SOONER)


def test_the_decode_worker_that_is_first_is_taken() -> None:
    decodes = [worker("d1", 500.0), worker("d2", 900.0), worker("d3", 900.0, num_waiting_tokens=50)]
    assert choose_way([worker("p", num_waiting_tokens=1999)], decodes, 200, 0, {}, LIMITS) == (
        Route(None, "d2"),
        Reason.SOONER,
    )
    ties = [worker("d1"), worker("d2")]
    assert {choose_way([worker("p")], ties, 10, turn, {}, LIMITS)[0].decode for turn in range(2)} == {"d1", "d2"}  # type: ignore[index]


@pytest.mark.parametrize(
    "decode",
    [
        pytest.param(worker("d", 0.0), id="no budget"),
        pytest.param(worker("d", num_waiting_tokens=2001), id="two seconds of prompts wait there"),
        pytest.param(worker("d", num_requests=4, max_running=4), id="no place in its batch"),
        pytest.param(worker("d", num_free_blocks=1), id="no blocks"),
        pytest.param(worker("d", None, num_waiting_tokens=1), id="it is being tried"),
    ],
)
def test_a_decode_worker_that_is_full_computes_no_prompt(decode: WorkerView) -> None:
    assert way(worker("p", num_waiting_tokens=1999), decode, 20) == (HANDED_OVER, Reason.ONLY_WAY)
    assert way(worker("p", num_waiting_tokens=2001), decode, 20) is None, "it waits"


def test_without_a_place_at_a_prefill_worker_a_prompt_goes_the_other_way_or_waits_for_it() -> None:
    full = worker("p", num_waiting_tokens=2001)
    assert way(full, worker("d", 100.0), 100) == (LOCAL, Reason.SOONER)
    assert way(full, worker("d", 40.0), 100) is None, "2.1 s from now it would have its first token over the hand-off"
    whatever_waits = Limits(prefill_backlog_s=float("inf"), local_backlog_s=2.0)
    assert way(full, worker("d", 40.0), 100, whatever_waits) == (HANDED_OVER, Reason.SOONER)


def test_while_no_speed_is_known_prompts_are_handed_over() -> None:
    assert way(worker("p", None), worker("d", None), 5) == (HANDED_OVER, Reason.ONLY_WAY)
    assert way(worker("p", None), worker("d"), 5) == (HANDED_OVER, Reason.UNKNOWN)


def test_a_decode_worker_whose_speed_is_not_known_is_tried() -> None:
    """A decode worker of unknown speed counts as fast as a prefill worker. It gets one prompt, and no other while it has that."""
    idle, busy = worker("d", None), worker("d", None, num_requests=1)
    for untried in (idle, busy):
        assert way(worker("p"), untried, 89) == (LOCAL, Reason.SOONER)
        assert way(worker("p"), untried, 90) == (HANDED_OVER, Reason.SOONER)
        assert way(worker("p", num_waiting_tokens=1990), untried, 3000) == (LOCAL, Reason.SOONER)
    tried = worker("d", None, num_requests=1, num_waiting_tokens=1)
    assert way(worker("p", num_waiting_tokens=1990), tried, 3000) == (HANDED_OVER, Reason.ONLY_WAY)


def test_who_may_not_be_handed_over_is_computed_by_a_decode_worker_that_can() -> None:
    assert choose_way([], [worker("d")], 5000, 0, {}, LIMITS) == (LOCAL, Reason.ONLY_WAY)
    assert choose_way([], [worker("d", None)], 5000, 0, {}, LIMITS) == (LOCAL, Reason.ONLY_WAY)
    slow, untried = worker("slow", 10.0), worker("untried", None)
    assert choose_way([], [untried, slow], 5000, 0, {}, LIMITS) == (Route(None, "slow"), Reason.ONLY_WAY)
    tried = worker("d", None, num_waiting_tokens=1)
    assert choose_way([], [tried], 5000, 0, {}, LIMITS) is None, "it has one prompt already"
    assert choose_way([worker("p")], [], 20, 0, {}, LIMITS) is None


def test_without_local_prefill_all_prompts_are_handed_over() -> None:
    without = Limits(prefill_backlog_s=2.0, local_backlog_s=None)
    assert way(worker("p"), worker("d"), 1, without) == (HANDED_OVER, Reason.ONLY_WAY)
    assert way(worker("p", num_waiting_tokens=2001), worker("d"), 1, without) is None


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
    assert choose([], [full], 160, 0, NOTHING) == Route(None, "d1")  # a full worker refuses by itself


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
        (b"a", [], [], b"a"),  # no worker is up: the last layout stays
        (None, [b"a"], [b"b"], b"b"),
        (None, [b"a", b"a", b"b"], [b"b"], b"b"),  # only "b" has workers of both roles
        (None, [], [b"a", b"b", b"b"], b"b"),
        (b"a", [b"a", b"b", b"b"], [b"a", b"b", b"b"], b"a"),  # the layout stays while its workers can serve
        (b"a", [b"b", b"b"], [b"a", b"b"], b"b"),  # the layout changes when they cannot
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
        (49, 0, "d2"),  # 10 cached blocks outweigh 40 used ones and a quarter
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
    """A thousand requests share a system prompt of 512 tokens, which each used worker then has. The load stays even."""
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
