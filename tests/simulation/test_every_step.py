"""One request, and one fault right before each single thing that happens while it runs.

The request passes queue, offer, grant, shipping, commit, verdict and decoding; with a spare worker of each role, no fault of a
worker or of the network may cost more than time.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from .faults import Fault, cut, drain, freeze, kill, leave, stop
from .world import Client, World, running

PROMPT = list(range(1, 40))
NUM_TOKENS = 12
SEED = 7
STRIDE = int(os.environ.get("KVRELAY_TEST_STRIDE", "20"))  # every so many moments; each fault begins at another one

WORKER_FAULTS: dict[str, Fault] = {
    **{f"kill {name}": kill(name) for name in ("p0", "p1", "d0", "d1")},
    **{f"stop {name}": stop(name) for name in ("p0", "p1", "d0", "d1")},
    **{f"drain {name}": drain(name) for name in ("p0", "p1", "d0", "d1")},
    **{f"cut {a} {b}": cut(a, b) for a in ("g0", "p0", "p1") for b in ("d0", "d1")},
    **{f"cut g0 {name}": cut("g0", name) for name in ("p0", "p1")},
    **{f"freeze {a} {b}": freeze(a, b) for a in ("g0", "p0", "p1") for b in ("d0", "d1")},
    **{f"freeze g0 {name}": freeze("g0", name) for name in ("p0", "p1")},
}


@pytest.fixture(scope="module")
def moments() -> range:
    """The events of the undisturbed request."""
    with running(SEED) as world:
        first = world.loop.num_events + 1
        client = world.submit("g0", PROMPT, NUM_TOKENS)
        while client.outcome is None:
            world.advance(0.001)
        last = world.loop.num_events
        world.settle()
        world.check()
        assert client.outcome == "finished"
    assert last - first > 100, "too little happens to prove anything"
    return range(first, last + 1)


def struck(moment: int, fault: Fault, *, seal_kv: bool = False) -> tuple[World, Client]:
    """The world after ``fault`` came right before event ``moment``, everything settled and checked."""
    with running(SEED, seal_kv=seal_kv) as world:
        world.loop.triggers[moment] = lambda: fault(world)
        client = world.submit("g0", PROMPT, NUM_TOKENS)
        world.advance(12.0)  # longer than silence is borne
        assert moment not in world.loop.triggers, "the fault never came"
        world.settle()
        world.check()
        assert world.refused("bad_checksum") == 0
        return world, client


@pytest.mark.parametrize("name", WORKER_FAULTS)
def test_a_worker_or_a_connection_fails_and_the_client_sees_nothing(name: str, moments: range) -> None:
    offset = list(WORKER_FAULTS).index(name) % STRIDE
    for moment in moments[offset::STRIDE]:
        _, client = struck(moment, WORKER_FAULTS[name], seal_kv=moment % 2 == 1)
        assert client.outcome == "finished", f"{name} before event {moment}: {client.outcome}"


def test_a_gateway_is_killed_and_nothing_is_left_of_its_request(moments: range) -> None:
    outcomes = Counter(struck(moment, kill("g0"))[1].outcome for moment in moments[::STRIDE])
    assert set(outcomes) <= {"gateway_killed", "finished"}
    assert outcomes["gateway_killed"] > outcomes["finished"]


def test_a_client_leaves_and_its_blocks_are_back_within_a_second(moments: range) -> None:
    num_cancelled = 0
    for moment in moments[:: max(1, STRIDE // 3)]:
        with running(SEED) as world:
            left_s: list[float] = []

            def fault(world: World = world, left_s: list[float] = left_s) -> None:
                leave(world)
                left_s.append(world.loop.now_s)

            world.loop.triggers[moment] = fault
            client = world.submit("g0", PROMPT, NUM_TOKENS)
            while not left_s:
                world.advance(0.001)
            num_cancelled += client.outcome != "finished"
            while (left := world.left_over()) and world.loop.now_s < left_s[0] + 1.0:
                world.advance(0.05)
            assert not left, f"a second after the client left before event {moment}: {left}"
            world.settle()
            world.check()
    assert num_cancelled > 10, "the client left too late to prove anything"


def test_blocks_are_not_written_again_while_they_are_being_sent(moments: range) -> None:
    """The next prompt waits for just the blocks of the one that is taken back in the midst of its hand-off."""
    num_finished = 0
    for moment in moments[:: max(1, STRIDE // 3)]:
        with running(SEED, num_prefills=1, num_decodes=1) as world:
            world.wires.send_s = 0.05
            world.loop.triggers[moment] = lambda world=world: leave(world)
            world.submit("g0", PROMPT, NUM_TOKENS)
            waits = world.submit("g0", list(range(100, 190)), 2)
            world.advance(5.0)
            world.settle()
            world.check()
            num_finished += waits.outcome == "finished"
    assert num_finished == len(moments[:: max(1, STRIDE // 3)])
