"""One request, and one fault right before each event of its life: queue, offer, grant, shipping, commit, verdict and decoding.

There is a spare worker of each role. A fault of one worker or of the network may delay the request, but the client gets its answer.
"""

from __future__ import annotations

import pytest
from hypothesis import settings

from kvrelay.wire.transfers import TransferSettings

from .faults import Fault, cut, cut_blocks, drain, freeze, freeze_blocks, kill, leave, stop
from .world import Client, World, running

PROMPT = list(range(1, 40))
NUM_TOKENS = 12
SEED = 7
WINDOWS = (None, 10)  # two groups of layers, the second with a window that blocks fall out of
AT_ONCE_S = 3.0  # enough for a request with a second attempt, and shorter than the time-outs of peers and verdicts
NO_VERDICT_S = TransferSettings().verify_timeout_s
# Each fault is tried at every STRIDE-th event, by hypothesis's profile. Each fault begins at another event.
STRIDE = {"fast": 60, "all": 20, "fuzz": 1}[settings.get_current_profile_name()]
FULL_STRIDE = min(STRIDE, 20)  # of tests that count what they struck; `make test` leaves them out
FAST = ("kill p0", "drain p0", "stop d0", "cut p0 d0", "freeze g0 d0", "cut blocks p0 d0")  # of the faults

WORKER_FAULTS: dict[str, Fault] = {
    **{f"kill {name}": kill(name) for name in ("p0", "p1", "d0", "d1")},
    **{f"stop {name}": stop(name) for name in ("p0", "p1", "d0", "d1")},
    **{f"drain {name}": drain(name) for name in ("p0", "p1", "d0", "d1")},
    **{f"cut {a} {b}": cut(a, b) for a in ("g0", "p0", "p1") for b in ("d0", "d1")},
    **{f"cut g0 {name}": cut("g0", name) for name in ("p0", "p1")},
    **{f"freeze {a} {b}": freeze(a, b) for a in ("g0", "p0", "p1") for b in ("d0", "d1")},
    **{f"freeze g0 {name}": freeze("g0", name) for name in ("p0", "p1")},
    **{f"cut blocks {a} {b}": cut_blocks(a, b) for a in ("p0", "p1") for b in ("d0", "d1")},
    **{f"freeze blocks {a} {b}": freeze_blocks(a, b) for a in ("p0", "p1") for b in ("d0", "d1")},
}


@pytest.fixture(scope="module")
def moments() -> range:
    """The numbers of the events while an undisturbed request runs."""
    with running(SEED, windows=WINDOWS) as world:
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
    """Run a request with ``fault`` right before event ``moment``; settle and check the world."""
    with running(SEED, windows=WINDOWS, seal_kv=seal_kv) as world:
        world.loop.triggers[moment] = lambda: fault(world)
        client = world.submit("g0", PROMPT, NUM_TOKENS, defers=moment % 4 > 1)
        world.advance(12.0)  # longer than a silent peer is tolerated
        assert moment not in world.loop.triggers, "the fault never came"
        world.settle()
        world.check()
        assert world.refused("bad_checksum") == 0
        return world, client


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.full) for name in WORKER_FAULTS]
)
def test_a_worker_or_a_connection_fails_and_the_client_sees_nothing(name: str, moments: range) -> None:
    offset = list(WORKER_FAULTS).index(name) % STRIDE
    for moment in moments[offset::STRIDE]:
        _, client = struck(moment, WORKER_FAULTS[name], seal_kv=moment % 2 == 1)
        assert client.outcome == "finished", f"{name} before event {moment}: {client.outcome}"


@pytest.mark.full
def test_a_broken_connection_for_blocks_is_noticed_at_once_and_no_worker_counts_as_lost(moments: range) -> None:
    """All connections for KV blocks break. The request finishes within ``AT_ONCE_S``, and no gateway link is lost."""
    num_tried_again = 0
    for moment in moments[:: max(1, FULL_STRIDE // 4)]:
        with running(SEED, windows=WINDOWS, seal_kv=moment % 2 == 1, local_prefill="fallback") as world:
            gateways = [one for one in world.wires.connections if one.client.process.name.startswith("g")]

            def strike(world: World = world) -> None:
                for sender in world.wires.senders:
                    sender.break_off()

            world.loop.triggers[moment] = strike
            client, begun_s = world.submit("g0", PROMPT, NUM_TOKENS), world.loop.now_s
            while client.outcome is None and world.loop.now_s < begun_s + AT_ONCE_S:
                world.advance(0.01)
            assert client.outcome == "finished", f"before event {moment}: still {client.outcome} after {AT_ONCE_S:g} s"
            num_tried_again += world.count("kvrelay_handoffs_total", outcome="peer_lost") > 0
            assert {*gateways} <= {*world.wires.connections}
            world.settle()
            world.check()
    assert num_tried_again > 5, "hardly any fault came in the midst of a hand-off"


@pytest.mark.full
def test_a_connection_for_blocks_that_leads_nowhere_is_not_used_again(moments: range) -> None:
    """The only connection for KV blocks freezes, and the missing verdict is the only sign of it.

    The request finishes after the verdict's time-out. The next request does not wait for a verdict again.
    """
    num_waited = 0
    for moment in moments[:: max(1, FULL_STRIDE // 5)]:
        seal_kv = moment % 2 == 1
        with running(
            SEED, windows=WINDOWS, num_prefills=1, num_decodes=1, seal_kv=seal_kv, local_prefill="fallback"
        ) as world:
            world.loop.triggers[moment] = lambda world=world: freeze_blocks("p0", "d0")(world)
            client, begun_s = world.submit("g0", PROMPT, NUM_TOKENS), world.loop.now_s
            while client.outcome is None and world.loop.now_s < begun_s + NO_VERDICT_S + AT_ONCE_S:
                world.advance(0.05)
            assert client.outcome == "finished", f"before event {moment}: {client.outcome}"
            if world.loop.now_s > begun_s + AT_ONCE_S:
                num_waited += 1
                begun_s, later = world.loop.now_s, world.submit("g0", list(range(50, 90)), NUM_TOKENS)
                while later.outcome is None and world.loop.now_s < begun_s + AT_ONCE_S:
                    world.advance(0.05)
                assert later.outcome == "finished", f"before event {moment}: the same again"
            world.settle()
            world.check()
    assert num_waited > 5, "hardly any fault came in the midst of a hand-off"


SLOW_STEP_S = 0.1  # at most: the request takes seconds if it is not cancelled
SLOW_TOKENS = 60


@pytest.fixture(scope="module")
def slow_moments() -> range:
    """The numbers of the events while an undisturbed request runs on a slow model."""
    with running(SEED, windows=WINDOWS) as world:
        world.loop.step_s = SLOW_STEP_S
        first, begun_s = world.loop.num_events + 1, world.loop.now_s
        client = world.submit("g0", PROMPT, SLOW_TOKENS)
        while client.outcome is None:
            world.advance(0.001)
        assert world.loop.now_s - begun_s > 2.0, "it is over before anybody could leave it running"
        return range(first, world.loop.num_events - 40)


@pytest.mark.parametrize("name", [pytest.param("leave", marks=pytest.mark.full), "kill g0"])
def test_whose_client_or_gateway_is_gone_holds_no_block_after_a_second(name: str, slow_moments: range) -> None:
    fault: Fault = leave if name == "leave" else kill("g0")
    for moment in slow_moments[:: max(1, STRIDE // 2)]:
        with running(SEED, windows=WINDOWS) as world:
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
    """The client of a request leaves during its hand-off, and the next prompt waits for its blocks.

    ``world.check`` fails if a block's memory changes while it is sent.
    """
    num_finished = 0
    for moment in moments[:: max(1, STRIDE // 3)]:
        with running(SEED, windows=WINDOWS, num_prefills=1, num_decodes=1) as world:
            world.wires.send_s = 0.05
            world.loop.triggers[moment] = lambda world=world: leave(world)
            world.submit("g0", PROMPT, NUM_TOKENS)
            waits = world.submit("g0", list(range(100, 190)), 2)
            world.advance(5.0)
            world.settle()
            world.check()
            num_finished += waits.outcome == "finished"
    assert num_finished == len(moments[:: max(1, STRIDE // 3)])
