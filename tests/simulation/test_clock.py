"""A world's clock is virtual, its seed decides all that happens, and what fails in it is found."""

from __future__ import annotations

import asyncio
import logging

import pytest

from kvrelay.engine.fake.engine import FakeEngine, FakePace, fake_card
from kvrelay.engine.step.plan import StepPlan

from .faults import kill
from .world import running


def test_who_reads_the_real_clock_in_virtual_time_is_found() -> None:
    paced = FakeEngine(fake_card(), pace=FakePace(0.0, 0.0))
    with running() as world:
        with pytest.raises(AssertionError, match=r"kvrelay\.engine\.fake\.engine calls time\.monotonic\(\)"):
            paced.launch(StepPlan(())).wait()
        assert world.problems == ["kvrelay.engine.fake.engine calls time.monotonic() in virtual time"]
        world.problems.clear()
        world.check()
    assert paced.launch(StepPlan(())).wait() == []


def test_the_seed_decides_all_that_happens() -> None:
    def story(seed: int) -> tuple[int, float, list[str | None]]:
        with running(seed, num_gateways=2, drafts=True) as world:
            for number in range(12):
                world.submit(f"g{number % 2}", list(range(number, number + 40)), 20)
            world.advance(0.2)
            kill("d1")(world)
            world.settle()
            return world.loop.num_events, world.loop.now_s, [client.outcome for client in world.clients]

    assert story(3) == story(3)
    assert story(3)[:2] != story(4)[:2]


async def fail() -> None:
    raise ValueError("a task")


def test_what_fails_unseen_is_a_problem() -> None:
    """An error in a task that nobody awaits, in a callback, or in a log."""
    with running() as world:
        context = world.members["p0"].process.context
        world.loop.call_soon(lambda: asyncio.ensure_future(fail()), context=context)
        world.loop.call_soon(lambda: 1 // 0, context=context)
        logging.getLogger("kvrelay.anywhere").error("in a log")
        world.advance(0.1)
        found = sorted(world.problems)
    assert [one for one in found if "a task" in one or "ZeroDivision" in one or "in a log" in one] == found
    assert len(found) == 3
