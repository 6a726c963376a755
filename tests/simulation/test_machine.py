"""Many requests and faults in any order: hypothesis looks for a sequence that breaks kvrelay, and reports the shortest one.

After every event the books of every block manager agree. At the end each request has ended once, with the right tokens or with one
expected error. No process holds anything of a request, and no step read K/V of other tokens.
"""

from __future__ import annotations

from contextlib import ExitStack

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from .world import World, running

WORKERS = st.sampled_from(["p0", "p1", "d0", "d1"])
MEMBERS = st.sampled_from(["p0", "p1", "d0", "d1", "g0", "g1"])
GATEWAYS = st.sampled_from(["g0", "g1"])
FAULTS = st.sampled_from(["kill", "stop", "drain"])
SECONDS = st.sampled_from([0.001, 0.02, 0.3, 2.0, 8.0])  # shorter and longer than a silent peer is tolerated
DROP = st.sampled_from([0.0, 0.02, 0.3])
ODD = st.sampled_from([0.0, 0.05, 0.2])

HONEST_ENDS = {"finished", "cancelled", "gateway_killed", "unavailable", "timeout", "attempts_failed"}


class Acts(RuleBasedStateMachine):
    """Two gateways and two workers of each role, with the requests and faults that happen to them."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.world: World

    def begin(self, seed: int, seal_kv: bool) -> None:
        windows = (None, 10) if seed % 2 else (None,)  # of groups of layers
        drafts = seed % 3 == 0  # decode workers speculate
        world = running(seed, num_gateways=2, seal_kv=seal_kv, windows=windows, drafts=drafts)
        self.world = self.stack.enter_context(world)

    @rule(gateway=GATEWAYS, family=st.integers(0, 2), num_prompt=st.integers(1, 60), num_tokens=st.integers(1, 30))
    def submit(self, gateway: str, family: int, num_prompt: int, num_tokens: int) -> None:
        """Send a request. Prompts of a family share a prefix, so that caches matter."""
        if self.world.is_up(gateway):
            defers = (num_prompt + num_tokens) % 2 == 1
            self.world.submit(gateway, list(range(family, family + num_prompt)), num_tokens, defers=defers)

    @rule(gateway=GATEWAYS, num_requests=st.integers(2, 8), num_prompt=st.integers(20, 90))
    def burst(self, gateway: str, num_requests: int, num_prompt: int) -> None:
        """Send more requests at a time than the workers have blocks for."""
        for family in range(num_requests):
            self.submit(gateway, 10 * family, num_prompt, 5)

    @precondition(lambda self: self.world.clients)
    @rule(index=st.integers(0, 100))
    def leave(self, index: int) -> None:
        self.world.clients[index % len(self.world.clients)].leave()

    @rule(milliseconds=st.sampled_from([1, 3, 10, 30, 100, 500, 2000, 6000]))
    def wait(self, milliseconds: int) -> None:
        self.world.advance(milliseconds / 1000)

    @rule(fault=FAULTS, name=MEMBERS, seconds=SECONDS)
    def strike(self, fault: str, name: str, seconds: float) -> None:
        self.fault(fault, name, seconds)

    @rule(num_events=st.integers(1, 60), fault=FAULTS, name=WORKERS, seconds=SECONDS)
    def strike_soon(self, num_events: int, fault: str, name: str, seconds: float) -> None:
        """The fault comes between two callbacks, ``num_events`` from now."""
        world = self.world
        world.loop.triggers[world.loop.num_events + num_events] = lambda: self.fault(fault, name, seconds)

    @precondition(lambda self: self.world.wires.connections)
    @rule(index=st.integers(0, 100), is_cut=st.booleans(), seconds=SECONDS)
    def disturb(self, index: int, is_cut: bool, seconds: float) -> None:
        wires = self.world.wires
        connection = wires.connections[index % len(wires.connections)]
        if is_cut:
            wires.break_off(connection)
        else:
            wires.freeze(connection)
            self.world.later(seconds, lambda: wires.thaw(connection))

    @precondition(lambda self: self.world.wires.senders)
    @rule(index=st.integers(0, 100), is_cut=st.booleans(), num_events=st.integers(0, 60), seconds=SECONDS)
    def disturb_blocks(self, index: int, is_cut: bool, num_events: int, seconds: float) -> None:
        """A connection for KV blocks breaks or freezes, ``num_events`` from now."""
        world = self.world
        sender = world.wires.senders[index % len(world.wires.senders)]

        def disturb() -> None:
            if is_cut:
                sender.break_off()
            else:
                sender.freeze()
                world.later(seconds, sender.thaw)

        world.loop.triggers[world.loop.num_events + 1 + num_events] = disturb

    def fault(self, fault: str, name: str, seconds: float) -> None:
        """Stop, drain or kill a running member. After ``seconds`` it resumes or is started anew."""
        world, member = self.world, self.world.members[name]
        if not world.is_up(name):
            return
        if fault == "stop":
            member.process.stop()
            world.later(seconds, member.process.resume)
            return
        if fault == "drain" and name[0] != "g":
            world.drain(name)
        else:
            world.kill(name)
        world.later(seconds, lambda: world.start_anew(member))

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
        for cause in ("bad_checksum", "bad_seal", "wrong_block", "wrong_piece", "bad_size", "duplicate"):
            assert self.world.refused(cause) == 0, f"honest workers, and a block was refused: {cause}"


class Deployment(Acts):
    """The network keeps TCP's promises."""

    @initialize(seed=st.integers(0, 1000), seal_kv=st.booleans())
    def begin_here(self, seed: int, seal_kv: bool) -> None:
        self.begin(seed, seal_kv)


class HostileDeployment(Acts):
    """The network also loses, doubles and reorders single messages, and flips bits of KV blocks."""

    @initialize(seed=st.integers(0, 1000), seal_kv=st.booleans(), drop=DROP, double=ODD, reorder=ODD, flip=ODD)
    def begin_hostile(self, seed: int, seal_kv: bool, drop: float, double: float, reorder: float, flip: float) -> None:
        self.begin(seed, seal_kv)
        self.change(drop, double, reorder, flip)

    @rule(drop=DROP, double=ODD, reorder=ODD, flip=ODD)
    def change(self, drop: float, double: float, reorder: float, flip: float) -> None:
        hostility = self.world.wires.hostility
        hostility.drop, hostility.double, hostility.reorder, hostility.flip = drop, double, reorder, flip

    def check_ends(self, outcomes: set[str]) -> None:
        # A doubled request is refused because the worker knows it already. TCP never doubles one.
        assert outcomes <= HONEST_ENDS | {"invalid_value"}, outcomes


_SETTINGS = settings(
    max_examples=settings().max_examples // 3,  # an example takes half a second
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)
TestDeployment = Deployment.TestCase
TestDeployment.settings = _SETTINGS
TestHostileDeployment = HostileDeployment.TestCase
TestHostileDeployment.settings = _SETTINGS
