"""A decode worker that comes up again under its address is used as soon as a gateway knows it."""

from __future__ import annotations

import pytest

from .world import running

SOON_S = 0.5


@pytest.mark.parametrize("down_s", [20 + 0.5 * step for step in range(8)])
def test_a_request_does_not_wait_until_a_prefill_worker_tries_a_link_again_by_itself(down_s: float) -> None:
    """While the decode worker is down, the prefill worker tries again ever more rarely."""
    with running(num_prefills=1, num_decodes=1, local_prefill="never") as world:
        world.submit("g0", list(range(20)), 3)
        assert world.until(world.are_over)
        for name in ("d0", "g0"):
            world.kill(name)
        world.advance(down_s)
        for name in ("d0", "g0"):
            world.start(name)
        pool = world.members["g0"]
        assert world.until(lambda: pool.pool is not None and all(one.is_usable for one in pool.pool.workers), 1.0)
        begun_s = world.loop.now_s
        world.submit("g0", list(range(20)), 3)
        assert world.until(world.are_over)
        assert world.loop.now_s - begun_s < SOON_S
        world.settle()
        world.check()
