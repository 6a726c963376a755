"""Workers of several ranks and stages, in different shapes: one fault right before each of many events.

A rank, a whole stage or a leader is killed, or a rank hangs. Every request still finishes with the right tokens.
"""

from __future__ import annotations

import pytest

from kvrelay.engine.ranks.messages import SILENT_S

from .faults import Fault, hang_ranks, kill, kill_ranks, moments_of, strike
from .ranks import Shape
from .test_every_step import SEED, STRIDE, WINDOWS
from .world import World, running

# With two K/V heads, d1 has each of them twice.
SHAPES = {"p0": Shape(2, 2), "p1": Shape(1, 3), "d0": Shape(1, 2), "d1": Shape(4, 1)}
PROMPTS = [list(range(first, first + count)) for first, count in ((1, 25), (81, 12), (31, 30), (1, 9))]
NUM_TOKENS = 24  # no output ends before that
STEPS = 6 * STRIDE  # a fault is tried at every STEPS-th event: these worlds are large

FAULTS: dict[str, Fault] = {
    **{
        f"kill rank {rank} of {name}": kill_ranks(name, rank) for name, shape in SHAPES.items() for rank in shape.others
    },
    **{f"hang rank {shape.others[-1]} of {name}": hang_ranks(name, shape.others[-1]) for name, shape in SHAPES.items()},
    "kill the last stage of p0": kill_ranks("p0", 2, 3),
    "kill all ranks but the leader of d1": kill_ranks("d1", 1, 2, 3),
    **{f"kill the leader of {name}": kill(name) for name in SHAPES},
}
FAST = ("kill rank 3 of p0", "kill rank 1 of d0", "hang rank 3 of d1", "kill the leader of d0")


def ask(world: World) -> None:
    for prompt in PROMPTS:
        world.submit("g0", prompt, NUM_TOKENS)


@pytest.fixture(scope="module")
def moments() -> range:
    """The numbers of the events while the undisturbed requests run."""
    with running(SEED, windows=WINDOWS, shapes=SHAPES) as world:
        found = moments_of(world, ask)
        world.settle()
        world.check()
        assert {client.outcome for client in world.clients} == {"finished"}
        for name, shape in SHAPES.items():
            ranks = world.members[name].ranks
            assert ranks is not None
            assert ranks.most_at_once == shape.num_stages, f"{name} never had a step in each stage"
        assert world.count("kvrelay_handoffs_total", outcome="verified") >= len(PROMPTS)
    assert len(found) > 500, "too little happens to prove anything"
    return found


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.full) for name in FAULTS]
)
def test_a_rank_of_any_stage_is_gone_and_the_clients_see_nothing(name: str, moments: range) -> None:
    victim = name.rpartition(" ")[2]
    struck = moments[STRIDE * list(FAULTS).index(name) % STEPS :: STEPS]
    num_lost = 0
    for moment in struck:
        with running(SEED, windows=WINDOWS, shapes=SHAPES, seal_kv=moment % 2 == 1) as world:
            happened = strike(world, moment, FAULTS[name])
            ask(world)
            world.advance(SILENT_S + 5.0)
            assert happened == [True], "the fault never came"
            world.settle()
            world.check()
            assert world.refused("bad_checksum") == 0
            assert {client.outcome for client in world.clients} == {"finished"}, f"{name} before event {moment}"
            assert [member.process.member for member in world.ended] == [victim], "not that worker alone"
            num_lost += sum(member.ranks is not None and member.ranks.lost is not None for member in world.ended)
    assert num_lost == (0 if name.startswith("kill the leader") else len(struck))
