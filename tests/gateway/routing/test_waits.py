"""Estimated waits compared with real ones, and refusals, in a simulation with one worker of each role."""

from __future__ import annotations

import asyncio

import pytest

from ..queueing import Client, Machines, Mix, Work, World, closed, open_loop

SHORT = Work(200, 100, 128)
LONG = Work(7000, 64, 64)
ANSWERS = Mix([Work(100, number, 1024) for number in (150, 200, 250, 300)])
MIXED = Mix([SHORT, SHORT, SHORT, LONG])
FEW_BLOCKS = Machines(max_running=100, num_blocks=200)


def p90_ratio(world: World) -> float:
    """The 90th percentile of the larger over the smaller of estimate and wait, with half a second added to both.

    Half a second is about the age of workers' reports.
    """
    pairs = [sorted((one.expected_s + 0.5, one.came_s + 0.5)) for one in world.waited]
    assert len(pairs) >= 20
    return sorted(longer / shorter for shorter, longer in pairs)[int(0.9 * len(pairs))]


@pytest.mark.parametrize(
    ("machines", "clients", "waits"),
    [
        pytest.param(Machines(), [closed(Mix([LONG]))] * 6, True, id="long, saturated"),
        pytest.param(Machines(), [open_loop(Mix([LONG]), 0.09)], True, id="long, not saturated"),
        pytest.param(Machines(), [closed(Mix([SHORT]))] * 40, True, id="short, saturated"),
        pytest.param(Machines(), [open_loop(Mix([SHORT]), 1.5)], False, id="short, not saturated"),
        pytest.param(Machines(), [closed(ANSWERS)] * 60, True, id="answers of many lengths, saturated"),
        pytest.param(FEW_BLOCKS, [closed(Mix([SHORT]))] * 40, True, id="few blocks, saturated"),
        pytest.param(Machines(), [closed(MIXED)] * 12, True, id="mixed, saturated"),
        pytest.param(Machines(), [open_loop(MIXED, 0.25)], True, id="mixed, not saturated"),
    ],
)
def test_an_estimate_is_near_the_wait_that_comes(machines: Machines, clients: list[Client], waits: bool) -> None:
    world = World(machines)
    world.run(*clients, for_s=300)
    assert p90_ratio(world) <= 1.5
    assert (max(one.came_s for one in world.waited) > 1) is waits


def test_what_can_be_served_is_served_with_default_settings() -> None:
    """Four clients send prompts of 7,000 tokens, each of which takes 9.5 s. With default settings none is refused."""
    world = World(Machines())
    world.run(*[closed(Mix([LONG]))] * 4, for_s=600)
    assert world.refused == []
    assert world.num_served > 55


def test_nobody_is_refused_by_what_others_of_another_kind_took() -> None:
    """Long requests were served before. A further long one with 12 s is refused; a short one, whose kind is unknown, is not."""
    world = World(Machines())

    async def come(world: World) -> None:
        await world.ask(LONG)
        first = asyncio.ensure_future(world.ask(LONG))
        await asyncio.sleep(0)
        await world.ask(LONG, timeout_s=12.0)
        await world.ask(Work(20, 5, 5), timeout_s=12.0)
        await first

    world.run(come, for_s=60)
    assert world.num_served == 3
    assert ["the request has 12 s" in text for text in world.refused] == [True]
