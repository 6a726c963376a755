"""One request, and one fault right before each single thing that happens while it runs.

The request passes queue, offer, grant, shipping, commit, verdict and decoding; with a spare worker of each role, no fault of a
worker or of the network may cost more than time.
"""

from __future__ import annotations

import os

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
        client = world.submit("g0", PROMPT, NUM_TOKENS, defers=moment % 4 > 1)
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


SLOW_STEP_S = 0.1  # at most: the request takes seconds, if nobody ends it
SLOW_TOKENS = 60


@pytest.fixture(scope="module")
def slow_moments() -> range:
    """The events of the undisturbed request on a slow model."""
    with running(SEED) as world:
        world.loop.step_s = SLOW_STEP_S
        first, begun_s = world.loop.num_events + 1, world.loop.now_s
        client = world.submit("g0", PROMPT, SLOW_TOKENS)
        while client.outcome is None:
            world.advance(0.001)
        assert world.loop.now_s - begun_s > 2.0, "it is over before anybody could leave it running"
        return range(first, world.loop.num_events - 40)


@pytest.mark.parametrize("name", ["leave", "kill g0"])
def test_whose_client_or_gateway_is_gone_holds_no_block_after_a_second(name: str, slow_moments: range) -> None:
    fault: Fault = leave if name == "leave" else kill("g0")
    for moment in slow_moments[:: max(1, STRIDE // 2)]:
        with running(SEED) as world:
            world.loop.step_s = SLOW_STEP_S
            gone_s: list[float] = []

            def strike(world: World = world, gone_s: list[float] = gone_s) -> None:
                fault(world)
                gone_s.append(world.loop.now_s)

            world.loop.triggers[moment] = strike
            client = world.submit("g0", PROMPT, SLOW_TOKENS)
            while not gone_s:
                world.advance(0.001)
            while (left := world.left_over()) and world.loop.now_s < gone_s[0] + 1.0:
                world.advance(0.05)
            assert not left, f"a second after {name} before event {moment}: {left}"
            assert client.outcome in ("cancelled", "gateway_killed"), client.outcome
            world.settle()
            world.check()


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
