"""A whole deployment in virtual time: the real workers, gateways and clients over the sockets of :mod:`.wires`.

Services, schedulers, block managers, lease and transfer tables, control servers and clients, routing and relay are the real code.
Time, sockets and the threads (model loop, block sender and receiver) are simulated. The threads' work takes random times.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from prometheus_client import CollectorRegistry

from kvrelay.common.sampling import SamplingParams, Watermark
from kvrelay.decode_worker.draft_model import DraftModel
from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.decode_worker.worker import DecodeWorker
from kvrelay.engine.fake.engine import FakeEngine, FakePace
from kvrelay.engine.fake.language import expected_output
from kvrelay.engine.fake.step import Share
from kvrelay.gateway.errors import ApiError
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.relay.relay import Relay
from kvrelay.gateway.relay.request import GenerationRequest, RequestTimings
from kvrelay.gateway.settings import RelaySettings
from kvrelay.gateway.workers.pool import WorkerPool, static_workers
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings
from kvrelay.prefill_worker.worker import PrefillWorker
from kvrelay.wire.messages import TokenDelta
from kvrelay.wire.settings import LinkSettings
from kvrelay.worker.setup import Setup
from tests.draft_models import MistakenEngine
from tests.drafters import FakeOracle

from .clock import Process, ProcessState, SimLoop, no_real_clock
from .ranks import RankedSimEngine, Shape, layered_card
from .threads import SimModelLoop, sim_network
from .wires import Wires

VOCAB = 1000
STOPS = tuple(range(0, VOCAB, 20))  # tokens that end an output
NUM_BLOCKS = 28  # of each worker, by default
LINKS = LinkSettings(ping_interval_s=1.0, peer_timeout_s=4.0, hello_timeout_s=2.0, reconnect_max_s=2.0)
_LOOK_S = 0.2  # a worker that has lost a rank ends within this time
_RESTART_S = 1.0
QUIET_S = 120.0  # this long after the last fault every time-out has passed


@dataclass
class Client:
    """One request, its tokens and its outcome."""

    gateway: str
    prompt: list[int]
    max_tokens: int
    defers: bool = False  # the sampling of steps that run ahead, until the tokens in front are known
    tokens: list[int] = field(default_factory=list)
    outcome: str | None = None  # finished, cancelled, or an error's code; None: not over, or lost with its gateway
    num_ends: int = 0
    is_gone: bool = False
    task: asyncio.Task[None] | None = None

    def on_done(self, task: asyncio.Task[None]) -> None:
        """Called when the request's task has ended, perhaps before it began."""
        if task.cancelled():
            self.outcome = self.outcome or "cancelled"
        elif (error := task.exception()) is not None:
            self.outcome = repr(error)

    @property
    def expected(self) -> list[int]:
        """The tokens that any worker must generate."""
        output = expected_output(self.prompt, self.max_tokens, VOCAB)
        stop = next((place for place, token in enumerate(output) if token in STOPS), len(output))
        return output[: stop + 1]


@dataclass
class Member:
    """A process of the world, and the worker or gateway in it."""

    process: Process
    worker: PrefillWorker | DecodeWorker | None = None
    ranks: RankedSimEngine | None = None
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    pool: WorkerPool | None = None
    relay: Relay | None = None
    is_draining: bool = False


@dataclass(frozen=True)
class Machines:
    """The settings of all workers of a world."""

    num_blocks: int = NUM_BLOCKS
    block_size: int = 4
    seal_kv: bool = False
    windows: tuple[int | None, ...] = (None,)  # of each group of layers
    prefill: PrefillSchedulerSettings = field(
        default_factory=lambda: PrefillSchedulerSettings(max_batched_tokens=16, max_num_seqs=3, max_waiting=8)
    )
    decode: DecodeSchedulerSettings = field(
        default_factory=lambda: DecodeSchedulerSettings(
            max_num_seqs=3, max_batched_tokens=16, max_waiting=8, lease_ttl_s=5.0
        )
    )
    pace: FakePace | None = None  # None: steps take a moment by chance; else nothing runs ahead or is read back twice
    drafts: bool = False  # decode workers speculate (d0 by a draft model), and some drafts are wrong
    checks_books: bool = True  # check every worker's blocks after each of its events
    shapes: Mapping[str, Shape] = field(default_factory=dict)  # by worker; only those with several ranks

    def engine(self, name: str, process: Process, problems: list[str]) -> FakeEngine | RankedSimEngine:
        """The engine of worker ``name`` in ``process``. A rank that reads K/V of other tokens adds that to ``problems``."""
        card = layered_card(
            num_blocks=self.num_blocks, block_size=self.block_size, vocab_size=VOCAB, windows=self.windows
        )
        if (shape := self.shapes.get(name)) is not None:
            return RankedSimEngine(card, shape, process, problems)
        # d0 runs ahead, as on a GPU: it launches its next step before it knows the last step's tokens.
        runs_ahead = name == "d0"
        pace = self.pace
        if pace is None:
            return FakeEngine(card, runs_ahead=runs_ahead)

        def take_time(shares: Sequence[Share]) -> None:
            process.ahead_s += pace.of(shares)

        return FakeEngine(card, take_time, reads_back_once=True)

    def draft_engine(self) -> FakeEngine:
        """A draft engine with fewer blocks than its worker may need."""
        return MistakenEngine(
            4, num_blocks=self.num_blocks // 2 + 12, block_size=self.block_size, vocab_size=VOCAB, windows=self.windows
        )


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
        self.wires = Wires(self.loop)
        self.members: dict[str, Member] = {}
        self.clients: list[Client] = []
        self.problems = self.wires.problems
        self.ended: list[Member] = []  # ended members, kept so that the garbage collector does not end their tasks
        self._machines = machines
        self._relay = relay
        self._epochs = itertools.count(1)
        self.prefill_names = [f"p{index}" for index in range(num_prefills)]
        self.decode_names = [f"d{index}" for index in range(num_decodes)]
        self.gateway_names = [f"g{index}" for index in range(num_gateways)]
        if machines.checks_books:
            self.loop.after_event = self._check_books

    # -- members ---------------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Start a member's process, for the first time or anew."""
        if (before := self.members.get(name)) is not None:
            self.ended.append(before)
        epoch = next(self._epochs)
        member = self.members[name] = Member(Process(f"{name}.{epoch}", self.loop))
        self.loop.call_soon(self._boot, name, member, epoch, context=member.process.context)

    def _boot(self, name: str, member: Member, epoch: int) -> None:
        network = sim_network(self.wires)
        if name[0] == "g":
            metrics = GatewayMetrics(member.registry).of_model("tiny")
            member.pool = WorkerPool(member.process.name, metrics, LINKS, network, needs_prefill_workers=False)
            member.relay = Relay(member.pool, self._relay, metrics, network.clock)
            addresses = [[f"tcp://{one}:1" for one in names] for names in (self.prefill_names, self.decode_names)]
            member.pool.update(static_workers(*addresses))
            return
        machines, engine = self._machines, self._machines.engine(name, member.process, self.problems)
        setup = Setup(
            name,
            epoch,
            f"tcp://{name}:1",
            member.registry,
            network,
            cast(Any, SimModelLoop),
            LINKS,
            seal_kv=machines.seal_kv,
        )
        worker: PrefillWorker | DecodeWorker
        if name[0] == "p":
            worker = PrefillWorker(engine, machines.prefill, setup)
        else:
            has_model = machines.drafts and name == "d0"
            drafters = [FakeOracle(VOCAB)] if machines.drafts and not has_model else []
            draft_engine = machines.draft_engine() if has_model else None
            worker = DecodeWorker(engine, machines.decode, f"tcp://{name}:2", setup, drafters, draft_engine)
        member.worker = worker
        asyncio.ensure_future(worker.start())  # noqa: RUF006 - the loop keeps it
        if isinstance(engine, RankedSimEngine):
            member.ranks = engine
            asyncio.ensure_future(self._watch(name, member, worker, engine))  # noqa: RUF006

    async def _watch(
        self, name: str, member: Member, worker: PrefillWorker | DecodeWorker, ranks: RankedSimEngine
    ) -> None:
        """End a worker that has lost a rank, and start it anew. See kvrelay.worker.process.run."""
        while not ranks.not_live():
            await asyncio.sleep(_LOOK_S)
        await worker.stop()
        ranks.close()
        member.process.kill()
        self.wires.on_killed(member.process)
        self.later(_RESTART_S, lambda: self.start_anew(name, member))

    def kill(self, name: str) -> None:
        """SIGKILL."""
        member = self.members[name]
        member.process.kill()
        if member.ranks is not None:
            member.ranks.close()
        self.wires.on_killed(member.process)
        if name[0] == "g":
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
            worker.blocks.check_integrity()
            await worker.stop()
            member.process.kill()

        self.loop.call_soon(lambda: asyncio.ensure_future(end()), context=member.process.context)

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Call ``act`` after some seconds, in no process's context."""
        self.loop.call_at(self.loop.now_s + seconds, act, context=contextvars.Context())

    def start_anew(self, name: str, member: Member) -> None:
        """Start a member anew under the same address, once its old process has ended."""
        if self.members[name] is not member:
            return
        if member.process.state is ProcessState.DEAD:
            self.start(name)
        else:  # it still drains
            self.later(0.5, lambda: self.start_anew(name, member))

    def is_up(self, name: str) -> bool:
        """Whether the process runs."""
        return self.members[name].process.state is ProcessState.RUNNING

    # -- clients ---------------------------------------------------------------------------------------------------

    def submit(self, gateway: str, prompt: list[int], max_tokens: int, *, defers: bool = False) -> Client:
        """Send a request to a gateway that runs."""
        member = self.members[gateway]
        client = Client(member.process.name, prompt, max_tokens, defers)
        self.clients.append(client)
        request_id = f"r{len(self.clients)}"

        def begin() -> None:
            if not client.is_gone:
                client.task = asyncio.ensure_future(self._consume(member, client, request_id))
                client.task.add_done_callback(client.on_done)

        self.loop.call_soon(begin, context=member.process.context)
        return client

    async def _consume(self, member: Member, client: Client, request_id: str) -> None:
        assert member.relay is not None
        sampling = SamplingParams(
            max_tokens=client.max_tokens,
            temperature=0.0,
            stop_token_ids=STOPS,
            watermark=Watermark() if client.defers else None,  # which changes no token of a fake engine
        )

        def take(delta: TokenDelta) -> bool:
            client.tokens += [token.token_id for token in delta.tokens]
            if delta.finish_reason is not None:
                client.outcome = "finished"
                client.num_ends += 1
            return True

        try:
            await member.relay.run(
                GenerationRequest(request_id, client.prompt, sampling, RequestTimings(self.loop.now_s)), take
            )
        except ApiError as error:
            client.outcome = error.code
            client.num_ends += 1

    def cancel(self, client: Client) -> None:
        """The client leaves."""
        client.is_gone = True
        if client.task is None:
            client.outcome = client.outcome or "cancelled"
        elif client.outcome is None:
            client.task.cancel()

    # -- time ------------------------------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Let virtual time pass."""
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def settle(self) -> None:
        """End all faults, bring every member back, and wait up to ``QUIET_S`` until nothing is left over."""
        self.loop.triggers.clear()
        self.wires.hostility.drop = self.wires.hostility.double = 0
        self.wires.hostility.reorder = self.wires.hostility.flip = 0
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
        begun_s = self.loop.now_s
        while self.loop.now_s < begun_s + QUIET_S and self.left_over():
            self.advance(1.0)

    # -- checks ----------------------------------------------------------------------------------------------------

    def left_over(self) -> list[str]:
        """What running processes still hold of requests; empty when every request has ended everywhere."""
        left = [f"a client of {client.gateway} has no end" for client in self.clients if client.outcome is None]
        for name, member in self.members.items():
            if member.pool is not None and member.process.state is not ProcessState.DEAD:
                left += [f"{name} waits for {key}" for key in member.pool._listeners]
                left += [
                    f"{name} counts {one.load.attempts} at {one.address}"
                    for one in member.pool.workers
                    if one.load is not None and one.load.attempts
                ]
            if member.worker is not None and member.process.state is ProcessState.RUNNING:
                if member.worker.service.entries:
                    left.append(f"{name} still has {member.worker.service.debug()}")
                ledger = member.worker.blocks.ledger()
                if ledger.num_free + ledger.num_cached != ledger.num_blocks:
                    left.append(f"{name}: {ledger}")
                if (draft_model := _draft_model_of(member)) is not None and (owners := draft_model.blocks.owners()):
                    left.append(f"{name}: its draft model holds blocks of {owners}")
        return left

    def _check_books(self, process: Process) -> None:
        """Check the blocks of the process that has just run a callback; no other's can have changed."""
        for name, member in self.members.items():
            if member.process is process and member.worker is not None and process.state is not ProcessState.DEAD:
                try:
                    member.worker.blocks.check_integrity()
                    if (draft_model := _draft_model_of(member)) is not None:
                        draft_model.check_integrity()
                        assert not member.registry.get_sample_value("kvrelay_draft_model_failures_total")
                except AssertionError as error:
                    self.problems.append(f"{name} at event {self.loop.num_events}: {error}")

    def _on_loop_error(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, ApiError):
            return  # the client has been told this error
        self.problems.append(f"{context.get('message')}: {error!r}")

    def check(self) -> None:
        """Check all requests and workers of a settled world, and that no problem was noted before."""
        assert not self.problems, self.problems[:3]
        for client in self.clients:
            what = f"{client.outcome} after {len(client.tokens)} of {client.max_tokens} tokens"
            assert client.tokens == client.expected[: len(client.tokens)], f"a wrong token: {what}"
            assert client.outcome is not None, f"no end: {what}"
            assert client.num_ends <= 1, f"{client.num_ends} ends: {what}"
            if client.outcome == "finished":
                assert client.tokens == client.expected, what
        assert not (left := self.left_over()), left
        for member in [*self.members.values(), *self.ended]:
            failed_steps = member.registry.get_sample_value("kvrelay_failed_steps_total") or 0
            if member.ranks is not None and member.ranks.lost is not None:
                continue  # the lost rank failed a step; K/V of other tokens would be among the problems
            assert failed_steps == 0, f"{member.process.name}: a step read KV that was not its tokens'"

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
    seal_kv: bool = False,
    num_blocks: int = NUM_BLOCKS,
    local_prefill: str = "sooner",
    windows: tuple[int | None, ...] = (None,),
    drafts: bool = False,
    shapes: Mapping[str, Shape] | None = None,
) -> Iterator[World]:
    """A world with all members up, whose steps take random times."""
    relay = RelaySettings(local_prefill=local_prefill, request_timeout_s=60, room_timeout_s=20)
    machines = Machines(num_blocks=num_blocks, seal_kv=seal_kv, windows=windows, drafts=drafts, shapes=shapes or {})
    with living(lambda: World(seed, num_prefills, num_decodes, num_gateways, machines, relay)) as world:
        yield world


def _draft_model_of(member: Member) -> DraftModel | None:
    return member.worker.draft_model if isinstance(member.worker, DecodeWorker) else None


@contextmanager
def living(make: Callable[[], World]) -> Iterator[World]:
    """The world that ``make`` returns, with all members up."""
    logging.disable(logging.CRITICAL)
    with ExitStack() as stack:
        stack.callback(logging.disable, logging.NOTSET)
        world = make()
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
