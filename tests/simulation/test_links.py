"""A worker that comes up again under its address is used as soon as somebody wants it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvrelay.gateway.workers.pool import WorkerPool, static_workers

from .world import World, running

SOON_S = 0.5
PROMPT = list(range(20))
# While a worker is down, its peers try again ever more rarely, at last every 2 s.
at_any_moment = pytest.mark.parametrize("down_s", [20 + 0.5 * step for step in range(8)])


def pool_of(world: World) -> WorkerPool:
    pool = world.members["g0"].pool
    assert pool is not None
    return pool


def restart(world: World, down_s: float, *names: str) -> None:
    """Kill these members, and start them anew after ``down_s``."""
    for name in names:
        world.kill(name)
    world.advance(down_s)
    for name in names:
        world.start(name)


def are_up(world: World) -> bool:
    """Whether the gateway may use all workers."""
    pool = world.members["g0"].pool  # None until its process has begun
    return pool is not None and all(one.is_usable for one in pool.workers)


def is_soon(world: World, holds: Callable[[], bool]) -> bool:
    return world.until(holds, SOON_S)


@at_any_moment
def test_a_request_does_not_wait_until_a_prefill_worker_tries_a_link_again_by_itself(down_s: float) -> None:
    with running(num_prefills=1, num_decodes=1, local_prefill="never") as world:
        world.submit("g0", PROMPT, 3)
        assert world.until(world.are_over)
        restart(world, down_s, "d0", "g0")
        assert world.until(lambda: are_up(world), 1.0)
        world.submit("g0", PROMPT, 3)
        assert is_soon(world, world.are_over)
        world.settle()
        world.check()


@at_any_moment
def test_a_request_does_not_wait_until_a_gateway_tries_a_link_again_by_itself(down_s: float) -> None:
    with running(num_prefills=1, num_decodes=1, local_prefill="never") as world:
        restart(world, down_s, "d0")
        world.submit("g0", PROMPT, 3)
        assert is_soon(world, world.are_over)
        world.settle()
        world.check()


@at_any_moment
def test_a_prompt_that_is_computed_locally_in_need_calls_for_the_prefill_worker(down_s: float) -> None:
    with running(num_prefills=1, num_decodes=1) as world:
        restart(world, down_s, "p0")
        assert pool_of(world).is_local_only
        world.submit("g0", PROMPT, 3)
        assert is_soon(world, lambda: not pool_of(world).is_local_only)
        assert world.until(world.are_over)
        world.settle()
        world.check()


@at_any_moment
def test_a_worker_that_is_found_ready_again_is_up_soon(down_s: float) -> None:
    with running(num_prefills=1, num_decodes=1) as world:
        restart(world, down_s, "d0")
        found = static_workers(["tcp://p0:1"], ["tcp://d0:1"])
        world.loop.call_soon(pool_of(world).update, found, context=world.members["g0"].process.context)
        assert is_soon(world, lambda: are_up(world))
        world.settle()
        world.check()
