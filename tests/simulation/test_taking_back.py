"""The gateway takes prompts back from prefill workers' queues, and one fault comes right before each event meanwhile.

24 prompts arrive before any worker has reported its speed, so all go to prefill workers. When prefill workers report their speed,
decode workers are the sooner way for the last prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import settings

from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.engine.fake.engine import FakePace
from kvrelay.gateway.settings import RelaySettings
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings

from .faults import Fault, cut, drain, freeze, kill, stop, strike
from .machines import Machines
from .world import World, living

NUM_PROMPTS = 24
NUM_TOKENS = 6
MACHINES = Machines(
    num_blocks=320,
    prefill=PrefillSchedulerSettings(max_batched_tokens=16, max_num_seqs=3, max_waiting=64),
    decode=DecodeSchedulerSettings(max_num_seqs=NUM_PROMPTS, max_batched_tokens=32, lease_ttl_s=5.0),
    pace=FakePace(step_s=0.01, token_s=0.02),
)
RELAY = RelaySettings(request_timeout_s=60, room_timeout_s=20)
BEFORE, AFTER = 60, 60  # events around the answer to the first Withdraw
STRIDE = {"fast": 60, "all": 24, "fuzz": 1}[settings.get_current_profile_name()]

WORKER_FAULTS: dict[str, Fault] = {
    **{f"kill {name}": kill(name) for name in ("p0", "p1", "d0", "d1")},
    **{f"stop {name}": stop(name) for name in ("p0", "d0")},
    **{f"drain {name}": drain(name) for name in ("p0", "p1", "d0", "d1")},
    **{f"cut g0 {name}": cut("g0", name) for name in ("p0", "p1", "d0", "d1")},
    **{f"freeze g0 {name}": freeze("g0", name) for name in ("p0", "d0")},
}
FAST = ("kill p0", "kill d1", "drain p1", "cut g0 p0")


@contextmanager
def crowded() -> Iterator[World]:
    with living(lambda: World(5, 2, 2, 1, MACHINES, RELAY)) as world:
        for number in range(NUM_PROMPTS):
            world.submit("g0", [number, *range(38)], NUM_TOKENS)
        yield world


def num_taken_back(world: World) -> float:
    return world.count("kvrelay_attempts_total", outcome="taken_back")


@pytest.fixture(scope="module")
def moments() -> range:
    """The numbers of the events around the first prompt that is taken back, without a fault."""
    with crowded() as world:
        assert world.until(lambda: num_taken_back(world) > 0)
        moment = world.loop.num_events
        assert world.until(world.are_over)
        world.settle()
        world.check()
        assert {client.outcome for client in world.clients} == {"finished"}
        taken_back = num_taken_back(world)
        assert world.count("kvrelay_prompt_ways_total", way="local", reason="taken_back") == taken_back
        assert world.count("kvrelay_attempts_total", outcome="finished") == NUM_PROMPTS
        assert 1 <= taken_back <= NUM_PROMPTS / 2
    return range(moment - BEFORE, moment + AFTER)


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.full) for name in WORKER_FAULTS]
)
def test_whatever_fails_meanwhile_every_client_gets_its_answer(name: str, moments: range) -> None:
    offset = list(WORKER_FAULTS).index(name) % STRIDE
    for moment in moments[offset::STRIDE]:
        with crowded() as world:
            struck = strike(world, moment, WORKER_FAULTS[name])
            world.advance(20.0)
            assert struck == [True], "the fault never came"
            world.settle()
            world.check()
            outcomes = {client.outcome for client in world.clients}
            assert outcomes == {"finished"}, f"{name} before event {moment}: {outcomes}"


def test_a_client_may_leave_at_any_moment_meanwhile(moments: range) -> None:
    for moment in moments[:: max(1, STRIDE // 3)]:
        with crowded() as world:

            def leave(world: World, first: int = moment % 2) -> bool:
                for client in world.clients[first::2]:
                    client.leave()
                return True

            strike(world, moment, leave)
            world.advance(20.0)
            world.settle()
            world.check()
            assert {client.outcome for client in world.clients} == {"finished", "cancelled"}
