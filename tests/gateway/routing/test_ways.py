"""Which way a prompt goes: a pure function of what workers reported."""

from __future__ import annotations

import msgspec
import pytest

from kvrelay.gateway.routing.ways import Limits, Reason, Route, Way, choose_way
from kvrelay.gateway.workers.load import WorkerView

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
    """10 ms more than a tenth of its time: up to 90 tokens at 1,000 a second."""
    assert way(worker("p"), worker("d"), num_tokens) == (route, Reason.SOONER)


def test_a_long_prompt_of_which_the_decode_worker_lacks_little_is_computed_there() -> None:
    assert way(worker("p"), worker("d"), 5000, d=4960) == (LOCAL, Reason.SOONER)
    assert way(worker("p"), worker("d"), 5000, d=4960, p=4960) == (LOCAL, Reason.SOONER)
    assert way(worker("p"), worker("d"), 5000, p=4960) == (HANDED_OVER, Reason.SOONER)


def test_what_waits_counts_at_the_speed_at_which_it_is_computed() -> None:
    """200 tokens of a decode worker that has a quarter of its time for prompts: 0.8 s."""
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
    """As one like a prefill worker if it is idle; as one that has a quarter of its time for prompts if not."""
    idle, busy = worker("d", None), worker("d", None, num_requests=1)
    assert way(worker("p"), idle, 89) == (LOCAL, Reason.SOONER)
    assert way(worker("p"), idle, 90) == (HANDED_OVER, Reason.SOONER)
    assert way(worker("p", num_waiting_tokens=1000), busy, 300) == (HANDED_OVER, Reason.SOONER)
    assert way(worker("p", num_waiting_tokens=1100), busy, 300) == (LOCAL, Reason.SOONER)


def test_who_may_not_be_handed_over_is_computed_by_a_decode_worker_that_can() -> None:
    assert choose_way([], [worker("d")], 5000, 0, {}, LIMITS) == (LOCAL, Reason.ONLY_WAY)
    assert choose_way([], [worker("d", None)], 5000, 0, {}, LIMITS) is None
    assert choose_way([worker("p")], [], 20, 0, {}, LIMITS) is None


def test_without_local_prefill_all_prompts_are_handed_over() -> None:
    without = Limits(prefill_backlog_s=2.0, local_backlog_s=None)
    assert way(worker("p"), worker("d"), 1, without) == (HANDED_OVER, Reason.ONLY_WAY)
    assert way(worker("p", num_waiting_tokens=2001), worker("d"), 1, without) is None
