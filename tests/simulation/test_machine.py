"""Many requests and many faults in any order: hypothesis looks for the story that breaks kvrelay, and tells the shortest one.

What must hold at every moment: the books of every block manager agree. At the end of every story: each request has ended once, with
the right tokens or with one honest error; nobody holds anything; no step of any worker read KV that was not its tokens'.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from .clock import ProcessState
from .world import World, running

WORKERS = st.sampled_from(["p0", "p1", "d0", "d1"])
MEMBERS = st.sampled_from(["p0", "p1", "d0", "d1", "g0", "g1"])
GATEWAYS = st.sampled_from(["g0", "g1"])
NUM_EXAMPLES = int(os.environ.get("KVRELAY_TEST_STORIES", "15"))

HONEST_ENDS = {"finished", "cancelled", "gateway_killed", "unavailable", "timeout", "attempts_failed"}


class Deployment(RuleBasedStateMachine):
    """Two gateways, two workers of each role, and everything that happens to them."""

    is_hostile = False

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.world: World

    @initialize(seed=st.integers(0, 1000), seal_kv=st.booleans())
    def begin(self, seed: int, seal_kv: bool) -> None:
        self.world = self.stack.enter_context(running(seed, num_gateways=2, seal_kv=seal_kv))

    @rule(gateway=GATEWAYS, family=st.integers(0, 2), num_prompt=st.integers(1, 60), num_tokens=st.integers(1, 30))
    def submit(self, gateway: str, family: int, num_prompt: int, num_tokens: int) -> None:
        """Prompts of a family share their beginning, so that caches matter."""
        if self.world.is_up(gateway):
            self.world.submit(gateway, list(range(family, family + num_prompt)), num_tokens)

    @rule(gateway=GATEWAYS, num_requests=st.integers(2, 8), num_prompt=st.integers(20, 90))
    def burst(self, gateway: str, num_requests: int, num_prompt: int) -> None:
        """More at a time than there is room for."""
        for family in range(num_requests):
            self.submit(gateway, 10 * family, num_prompt, 5)

    @precondition(lambda self: self.world.clients)
    @rule(index=st.integers(0, 100))
    def leave(self, index: int) -> None:
        self.world.cancel(self.world.clients[index % len(self.world.clients)])

    @rule(milliseconds=st.sampled_from([1, 3, 10, 30, 100, 500, 2000, 6000]))
    def wait(self, milliseconds: int) -> None:
        self.world.advance(milliseconds / 1000)

    @rule(num_events=st.integers(1, 40), name=WORKERS, is_kill=st.booleans())
    def trip(self, num_events: int, name: str, is_kill: bool) -> None:
        """A worker is struck between two callbacks, some of them from now."""
        world = self.world
        what = world.kill if is_kill else lambda name: world.members[name].process.stop()
        world.loop.triggers[world.loop.num_events + num_events] = lambda: what(name)

    @rule(name=MEMBERS)
    def kill(self, name: str) -> None:
        self.world.kill(name)

    @rule(name=MEMBERS)
    def stop(self, name: str) -> None:
        self.world.members[name].process.stop()

    @rule(name=MEMBERS)
    def resume(self, name: str) -> None:
        self.world.members[name].process.resume()

    @rule(name=MEMBERS)
    def restart(self, name: str) -> None:
        """A new process under the old address."""
        if self.world.members[name].process.state is ProcessState.DEAD:
            self.world.start(name)

    @rule(name=WORKERS)
    def drain(self, name: str) -> None:
        self.world.drain(name)

    @precondition(lambda self: self.world.wires.connections)
    @rule(index=st.integers(0, 100), how=st.sampled_from(["cut", "freeze", "thaw"]))
    def disturb(self, index: int, how: str) -> None:
        wires = self.world.wires
        connection = wires.connections[index % len(wires.connections)]
        {"cut": wires.break_off, "freeze": wires.freeze, "thaw": wires.thaw}[how](connection)

    @invariant()
    def books_agree(self) -> None:
        assert not self.world.problems, self.world.problems[:3]

    def teardown(self) -> None:
        with self.stack:
            self.world.settle()
            self.world.check()
            self.check_ends({client.outcome or "" for client in self.world.clients})

    def check_ends(self, outcomes: set[str]) -> None:
        assert outcomes <= HONEST_ENDS, outcomes
        for cause in ("bad_checksum", "bad_seal", "wrong_block", "bad_size", "duplicate"):
            assert self.world.refused(cause) == 0, f"honest workers, and a block was refused: {cause}"


class HostileDeployment(Deployment):
    """The same over a network that also loses, doubles and reorders single messages and flips bits of KV blocks."""

    @rule(
        drop=st.sampled_from([0, 0.02, 0.3]),
        double=st.sampled_from([0, 0.1]),
        reorder=st.sampled_from([0, 0.1]),
        flip=st.sampled_from([0, 0.2]),
    )
    def turn_hostile(self, drop: float, double: float, reorder: float, flip: float) -> None:
        hostility = self.world.wires.hostility
        hostility.drop, hostility.double, hostility.reorder, hostility.flip = drop, double, reorder, flip

    def check_ends(self, outcomes: set[str]) -> None:
        # A request that came twice is refused as known already: an end that no network of this world's kind would bring about.
        assert outcomes <= HONEST_ENDS | {"invalid_value"}, outcomes


_SETTINGS = settings(
    max_examples=NUM_EXAMPLES, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestDeployment = Deployment.TestCase
TestDeployment.settings = _SETTINGS
TestHostileDeployment = HostileDeployment.TestCase
TestHostileDeployment.settings = _SETTINGS
