"""Two requests, and one fault right before each event of their lives: queue, offer, grant, shipping, commit, verdict and decoding.

Both use workers of their own, and either pair has room for both. A fault of one worker or of the network may delay a request, but
the client gets its answer.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import settings

from kvrelay.wire.transfers.transfer import TransferSettings

from .faults import (
    Fault,
    cut,
    cut_all_blocks,
    cut_blocks,
    drain,
    freeze,
    freeze_blocks,
    kill,
    leave,
    moments_of,
    stop,
    strike,
)
from .world import World, running

PROMPTS = [list(range(1, 40)), list(range(100, 139))]
NUM_TOKENS = 12
SEED = 7
WINDOWS = (None, 10)  # two groups of layers, the second with a window that blocks fall out of
ONE_EACH = {"num_prefills": 1, "num_decodes": 1}
AT_ONCE_S = 3.0  # enough for a request with a second attempt, and shorter than the time-outs of peers and verdicts
NO_VERDICT_S = TransferSettings().verify_timeout_s
# Each fault is tried at every STRIDE-th event, by hypothesis's profile. Each fault begins at another event.
STRIDE = {"fast": 60, "all": 20, "fuzz": 1}[settings.get_current_profile_name()]
FULL_STRIDE = min(STRIDE, 20)  # of tests that count what they struck; `make test` leaves them out

WORKERS = ("p0", "p1", "d0", "d1")
LINKS = (*(("g0", worker) for worker in WORKERS), ("p0", "d0"), ("p1", "d1"))
WORKER_FAULTS: dict[str, Fault] = {
    **{f"kill {name}": kill(name) for name in WORKERS},
    **{f"stop {name}": stop(name) for name in WORKERS},
    **{f"drain {name}": drain(name) for name in WORKERS},
    **{f"cut {a} {b}": cut(a, b) for a, b in LINKS},
    **{f"freeze {a} {b}": freeze(a, b) for a, b in LINKS},
    **{f"cut blocks {a} {b}": cut_blocks(a, b) for a, b in LINKS[-2:]},
    **{f"freeze blocks {a} {b}": freeze_blocks(a, b) for a, b in LINKS[-2:]},
}
FAST = ("kill p0", "drain p0", "stop d0", "cut p0 d0", "freeze g0 d0", "cut blocks p0 d0")


def ask_both(world: World, *, defers: bool = False) -> None:
    for prompt in PROMPTS:
        world.submit("g0", prompt, NUM_TOKENS, defers=defers)


@cache
def moments(**options: Any) -> range:
    """The numbers of the events while both undisturbed requests run in a world of these ``options``."""
    with running(SEED, **{"windows": WINDOWS, **options}) as world:
        found = moments_of(world, ask_both)
        pairs = {(sender.process.member, sender.address[6:8]) for sender in world.wires.senders}
        world.settle()
        world.check()
        assert {client.outcome for client in world.clients} == {"finished"}
    assert pairs == ({("p0", "d0")} if options.get("num_decodes") == 1 else {*LINKS[-2:]})
    assert len(found) > 200, "too little happens to prove anything"
    return found


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.full) for name in WORKER_FAULTS]
)
def test_a_worker_or_a_connection_fails_and_the_clients_see_nothing(name: str) -> None:
    offset, results = list(WORKER_FAULTS).index(name) % STRIDE, list[bool]()
    for moment in moments()[offset::STRIDE]:
        with running(SEED, windows=WINDOWS, seal_kv=moment % 2 == 1) as world:
            struck = strike(world, moment, WORKER_FAULTS[name])
            ask_both(world, defers=moment % 4 > 1)
            world.advance(12.0)  # longer than a silent peer is tolerated
            assert struck, "the fault never came"
            results += struck
            world.settle()
            world.check()
            assert world.refused("bad_checksum") == 0
            outcomes = [client.outcome for client in world.clients]
            assert outcomes == ["finished"] * 2, f"{name} before event {moment}: {outcomes}"
    assert any(results), "there was nothing to strike"


@pytest.mark.full
def test_a_broken_connection_for_blocks_is_noticed_at_once_and_no_worker_counts_as_lost() -> None:
    """All connections for KV blocks break. The requests finish within ``AT_ONCE_S``, and no gateway link is lost."""
    num_tried_again = 0
    for moment in moments(local_prefill="fallback")[:: max(1, FULL_STRIDE // 4)]:
        with running(SEED, windows=WINDOWS, seal_kv=moment % 2 == 1, local_prefill="fallback") as world:
            gateways = [one for one in world.wires.connections if one.client.process.member == "g0"]
            strike(world, moment, cut_all_blocks)
            ask_both(world)
            world.until(world.are_over, AT_ONCE_S)
            outcomes = [client.outcome for client in world.clients]
            assert outcomes == ["finished"] * 2, f"before event {moment}: {outcomes} after {AT_ONCE_S:g} s"
            num_tried_again += world.count("kvrelay_handoffs_total", outcome="peer_lost") > 0
            assert len(gateways) == len(WORKERS)
            assert {*gateways} <= {*world.wires.connections}
            world.settle()
            world.check()
    assert num_tried_again > 5, "hardly any fault came in the midst of a hand-off"


@pytest.mark.full
def test_a_connection_for_blocks_that_leads_nowhere_is_not_used_again() -> None:
    """The only connection for KV blocks freezes, and the missing verdict is the only sign of it.

    The requests finish after the verdict's time-out. The next request does not wait for a verdict again.
    """
    options: dict[str, Any] = {**ONE_EACH, "local_prefill": "fallback"}
    num_waited = 0
    for moment in moments(**options)[:: max(1, FULL_STRIDE // 5)]:
        with running(SEED, windows=WINDOWS, seal_kv=moment % 2 == 1, **options) as world:
            strike(world, moment, freeze_blocks("p0", "d0"))
            begun_s = world.loop.now_s
            ask_both(world)
            world.until(world.are_over, NO_VERDICT_S + AT_ONCE_S, step_s=0.05)
            outcomes = [client.outcome for client in world.clients]
            assert outcomes == ["finished"] * 2, f"before event {moment}: {outcomes}"
            if world.loop.now_s > begun_s + AT_ONCE_S:
                num_waited += 1
                world.submit("g0", list(range(50, 90)), NUM_TOKENS)
                world.until(world.are_over, AT_ONCE_S)
                assert world.clients[-1].outcome == "finished", f"before event {moment}: the same again"
            world.settle()
            world.check()
    assert num_waited > 5, "hardly any fault came in the midst of a hand-off"


SLOW_STEP_S = 0.1  # at most: the request takes seconds if it is not cancelled
SLOW_TOKENS = 60


@pytest.fixture(scope="module")
def slow_moments() -> range:
    """The numbers of the events while an undisturbed request runs on a slow model."""
    with running(SEED, windows=WINDOWS, **ONE_EACH) as world:
        world.loop.step_s = SLOW_STEP_S
        begun_s = world.loop.now_s
        found = moments_of(world, lambda world: world.submit("g0", PROMPTS[0], SLOW_TOKENS))
        assert world.loop.now_s - begun_s > 2.0, "it is over before anybody could leave it running"
        return found[:-40]


@pytest.mark.parametrize("name", [pytest.param("leave", marks=pytest.mark.full), "kill g0"])
def test_whose_client_or_gateway_is_gone_holds_no_block_after_a_second(name: str, slow_moments: range) -> None:
    for moment in slow_moments[:: max(1, STRIDE // 2)]:
        with running(SEED, windows=WINDOWS, **ONE_EACH) as world:
            world.loop.step_s = SLOW_STEP_S
            struck = strike(world, moment, leave if name == "leave" else kill("g0"))
            client = world.submit("g0", PROMPTS[0], SLOW_TOKENS)
            assert world.until(lambda struck=struck: bool(struck))
            world.until(lambda world=world: not world.left_over(), 1.0, step_s=0.05)
            assert not (left := world.left_over()), f"a second after {name} before event {moment}: {left}"
            assert client.outcome in ("cancelled", "gateway_killed"), client.outcome
            world.settle()
            world.check()


def test_blocks_are_not_written_again_while_they_are_being_sent() -> None:
    """The client of a request leaves during its hand-off, and the next prompt waits for its blocks.

    ``world.check`` fails if a block's memory changes while it is sent.
    """
    options: dict[str, Any] = {**ONE_EACH, "windows": (None,)}
    num_called_off = 0
    for moment in moments(**options)[:: max(1, STRIDE // 3)]:
        with running(SEED, **options) as world:
            world.wires.send_s = 0.2
            struck = strike(world, moment, leave)
            world.submit("g0", PROMPTS[0], NUM_TOKENS)
            waits = world.submit("g0", list(range(100, 209)), 2)  # takes all blocks
            world.advance(5.0)
            assert struck, "the client never left"
            num_called_off += world.count("kvrelay_handoffs_total", outcome="aborted") > 0
            world.settle()
            world.check()
            assert waits.outcome == "finished", f"the client left before event {moment}: {waits.outcome}"
    assert num_called_off, "nobody left during a hand-off"
