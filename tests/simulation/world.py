"""A whole deployment in virtual time: the real workers, gateways and clients over the sockets of :mod:`.wires`.

Services, schedulers, block managers, lease and transfer tables, control servers and clients, routing and relay are the real code.
Time, sockets and the threads (model loop, block sender and receiver) are simulated. The threads' work takes random times.

Not simulated are HTTP, keys, lines of shared memory, guides, adapters, beam searches and canaries.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.relay.relay import Relay
from kvrelay.gateway.settings import RelaySettings
from kvrelay.gateway.workers.pool import WorkerPool, static_workers

from .clock import Process, ProcessState, SimLoop
from .machines import LINKS, Machines, SimWorker
from .members import Client, Member
from .problems import no_logged_errors, no_real_clock
from .ranks import RankedSimEngine
from .threads import sim_network
from .wires import Hostility, Wires

_LOOK_S = 0.2  # a worker that has lost a rank ends within this time
_RESTART_S = 1.0
QUIET_S = 120.0  # this long after the last fault every time-out has passed


class World:
    """Prefill workers p0, p1 …, decode workers d0, d1 …, gateways g0, g1 …; use within ``with running(...)``."""

    def __init__(
        self,
        seed: int,
        num_prefills: int,
        num_decodes: int,
        num_gateways: int,
        machines: Machines,
        relay: RelaySettings,
    ) -> None:
        self.loop = SimLoop(seed)
        self.loop.set_exception_handler(self._on_loop_error)
        self.problems = self.loop.problems
        self.wires = Wires(self.loop)
        self.members: dict[str, Member] = {}
        self.ended: list[Member] = []  # ended members, kept so that the garbage collector does not end their tasks
        self.clients: list[Client] = []
        self.prefill_names = [f"p{index}" for index in range(num_prefills)]
        self.decode_names = [f"d{index}" for index in range(num_decodes)]
        self.gateway_names = [f"g{index}" for index in range(num_gateways)]
        self._machines = machines
        self._relay = relay
        self._epochs = itertools.count(1)
        if machines.checks_books:
            self.loop.after_event = self._check_books

    # -- members ---------------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Start a member's process, for the first time or anew."""
        if (before := self.members.get(name)) is not None:
            self.ended.append(before)
        epoch = next(self._epochs)
        member = self.members[name] = Member(Process(f"{name}.{epoch}", self.loop))
        boot = self._boot_gateway if name in self.gateway_names else self._boot_worker
        self.loop.call_soon(boot, member, epoch, context=member.process.context)

    def _boot_gateway(self, member: Member, _epoch: int) -> None:
        network, metrics = sim_network(self.wires), GatewayMetrics(member.registry).of_model("tiny")
        member.pool = WorkerPool(member.process.name, metrics, LINKS, network, needs_prefill_workers=False)
        member.relay = Relay(member.pool, self._relay, metrics, network.clock)
        addresses = [[f"tcp://{one}:1" for one in names] for names in (self.prefill_names, self.decode_names)]
        member.pool.update(static_workers(*addresses))

    def _boot_worker(self, member: Member, epoch: int) -> None:
        name = member.process.member
        engine = self._machines.engine(name, member.process)
        worker = self._machines.worker(engine, name, epoch, member.registry, sim_network(self.wires))
        member.worker = worker
        asyncio.ensure_future(worker.start())  # noqa: RUF006 - the loop keeps it
        if isinstance(engine, RankedSimEngine):
            member.ranks = engine
            asyncio.ensure_future(self._watch(member, worker, engine))  # noqa: RUF006

    async def _watch(self, member: Member, worker: SimWorker, ranks: RankedSimEngine) -> None:
        """End a worker that has lost a rank, and start it anew. See kvrelay.worker.process.run."""
        while not ranks.not_live():
            await asyncio.sleep(_LOOK_S)
        await worker.stop()
        ranks.close()
        member.process.kill()
        self.wires.on_killed(member.process)
        self.later(_RESTART_S, lambda: self.start_anew(member))

    def kill(self, name: str) -> None:
        """SIGKILL."""
        member = self.members[name]
        member.process.kill()
        if member.ranks is not None:
            member.ranks.close()
        self.wires.on_killed(member.process)
        for client in self.clients:
            if client.gateway == member.process.name and client.outcome is None:
                client.outcome = "gateway_killed"

    def drain(self, name: str) -> None:
        """SIGTERM: the worker finishes its requests, then ends."""
        member = self.members[name]
        if member.worker is None or member.is_draining or not self.is_up(name):
            return
        member.is_draining = True
        worker = member.worker

        async def end() -> None:
            await worker.drain()
            await worker.stop()
            member.process.kill()

        self.loop.call_soon(lambda: asyncio.ensure_future(end()), context=member.process.context)

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Call ``act`` after some seconds, in no process's context."""
        self.loop.call_at(self.loop.now_s + seconds, act, context=contextvars.Context())

    def start_anew(self, member: Member) -> None:
        """Start a member anew under the same address, once its old process has ended."""
        name = member.process.member
        if self.members[name] is not member:
            return
        if member.process.state is ProcessState.DEAD:
            self.start(name)
        else:  # it still drains
            self.later(0.5, lambda: self.start_anew(member))

    def is_up(self, name: str) -> bool:
        """Whether the process runs."""
        return self.members[name].process.state is ProcessState.RUNNING

    def submit(self, gateway: str, prompt: list[int], max_tokens: int, *, defers: bool = False) -> Client:
        """Send a request to a gateway that runs."""
        member = self.members[gateway]
        client = Client(member.process.name, prompt, max_tokens, defers)
        self.clients.append(client)
        request_id = f"r{len(self.clients)}"

        def begin() -> None:
            assert member.relay is not None
            client.begin(member.relay, request_id, self.loop.now_s)

        self.loop.call_soon(begin, context=member.process.context)
        return client

    # -- time ------------------------------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Let virtual time pass."""
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def until(self, holds: Callable[[], bool], most_s: float = 600.0, step_s: float = 0.001) -> bool:
        """Let time pass in steps until ``holds()``, at most ``most_s``. Returns whether it holds."""
        begun_s = self.loop.now_s
        while not (held := holds()) and self.loop.now_s < begun_s + most_s:
            self.advance(step_s)
        return held

    def are_over(self) -> bool:
        """Whether every request has an outcome."""
        return all(client.outcome is not None for client in self.clients)

    def settle(self) -> None:
        """End all faults, bring every member back, and wait up to ``QUIET_S`` until nothing is left over."""
        self.loop.triggers.clear()
        self.wires.hostility = Hostility()
        for connection in list(self.wires.connections):
            if connection.is_frozen:
                self.wires.thaw(connection)
        for sender in list(self.wires.senders):
            if sender.is_frozen:
                sender.thaw()
        for name, member in list(self.members.items()):
            member.process.resume()
            if member.process.state is ProcessState.DEAD:
                self.start(name)
        self.until(lambda: not self.left_over(), QUIET_S, step_s=1.0)

    # -- checks ----------------------------------------------------------------------------------------------------

    def left_over(self) -> list[str]:
        """What running processes still hold of requests; empty when every request has ended everywhere."""
        left = [f"a client of {client.gateway} has no end" for client in self.clients if client.outcome is None]
        return left + [one for member in self.members.values() for one in member.left_over()]

    def check(self) -> None:
        """Check all requests and workers of a settled world, and that no problem was noted before."""
        assert not self.problems, self.problems[:3]
        for client in self.clients:
            client.check()
        assert not (left := self.left_over()), left

    def _check_books(self, process: Process) -> None:
        """Check the books of the process that has just run a callback; no other's can have changed."""
        for member in self.members.values():
            if member.process is process and process.state is not ProcessState.DEAD:
                try:
                    member.check_books()
                except AssertionError as error:
                    self.problems.append(f"{process.name} at event {self.loop.num_events}: {error}")

    def _on_loop_error(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.problems.append(f"{context.get('message')}: {context.get('exception')!r}")

    def refused(self, cause: str) -> float:
        """The number of KV blocks that decode workers have refused for ``cause``."""
        return self.count("kvrelay_refused_kv_blocks_total", cause=cause)

    def count(self, metric: str, **labels: str) -> float:
        """The sum of a metric over all members, ended ones included."""
        members = [*self.members.values(), *self.ended]
        return sum(
            member.registry.get_sample_value(metric, labels if member.relay is None else {**labels, "model": "tiny"})
            or 0
            for member in members
        )


@contextmanager
def running(
    seed: int = 0,
    *,
    num_prefills: int = 2,
    num_decodes: int = 2,
    num_gateways: int = 1,
    local_prefill: str = "sooner",
    **machines: Any,
) -> Iterator[World]:
    """A world with all members up, whose steps take random times. ``machines``: fields of Machines."""
    relay = RelaySettings(local_prefill=local_prefill, request_timeout_s=60, room_timeout_s=20)
    with living(lambda: World(seed, num_prefills, num_decodes, num_gateways, Machines(**machines), relay)) as world:
        yield world


@contextmanager
def living(make: Callable[[], World]) -> Iterator[World]:
    """The world that ``make`` returns, with all members up."""
    world = make()
    with ExitStack() as stack:
        stack.enter_context(no_logged_errors(world.problems))
        stack.enter_context(no_real_clock(world.problems))
        for name in (*world.decode_names, *world.prefill_names, *world.gateway_names):
            world.start(name)
        try:
            world.advance(1.0)
            yield world
        finally:
            _end(world)


def _end(world: World) -> None:
    """Cancel all tasks, so that asyncio does not warn about any."""
    world.loop.after_event = lambda _: None
    world.loop.triggers.clear()
    world.loop.set_exception_handler(lambda *_: None)
    for member in [*world.members.values(), *world.ended]:
        member.process.revive()
    for _ in range(10):
        world.loop.run_until_complete(asyncio.sleep(0))  # asyncio warns about a coroutine that never began
        tasks = asyncio.all_tasks(world.loop)
        if not tasks:
            break
        for task in tasks:
            task.cancel()
        world.loop.run_until_complete(asyncio.wait(tasks, timeout=30))
    else:
        raise AssertionError(f"tasks that do not end: {tasks}")
    world.loop.run_until_complete(world.loop.shutdown_asyncgens())
    world.loop.close()
