"""A simulated queue in virtual time: workers that take time, the admission in front of them, and clients."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from kvrelay.gateway.errors import UnavailableError
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.routing.admission import Admission, Asked
from kvrelay.gateway.routing.estimates import Estimates
from kvrelay.gateway.routing.forecast import Prefiller, Supply
from kvrelay.gateway.workers.load import Load, WorkerView
from kvrelay.wire.messages import Status, WorkerState

from ..simulation.clock import SimLoop

_BLOCK = 16
_NUM_BLOCKS = 100_000


@dataclass
class Work:
    """The token counts of one request."""

    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int


@dataclass
class Machines:
    """The speed and the room of the workers."""

    prompt_tokens_per_s: float = 737.0
    step_s: float = 0.02  # of a decode batch of any size
    max_running: int = 8
    num_blocks: int = _NUM_BLOCKS


@dataclass
class Waited:
    """One estimated wait, and the real one."""

    expected_s: float
    came_s: float


Client = Callable[["World"], Coroutine[Any, Any, None]]


class World:
    """A prefill worker that computes one prompt after the other, a decode worker, and the admission in front of them."""

    def __init__(self, machines: Machines, *, room_timeout_s: float = 60.0) -> None:
        self.loop = SimLoop(0)
        self.machines = machines
        self.prefill = Load(_BLOCK)
        self.decode = Load(_BLOCK)
        self.waited: list[Waited] = []
        self.refused: list[str] = []
        self.num_served = 0
        self._changed = asyncio.Event()
        self._prompts: list[list[float]] = []  # tokens left of each prompt; the first one is being computed
        self._computing = asyncio.Lock()
        self._batch = asyncio.Semaphore(machines.max_running)
        self._number = 0
        metrics = GatewayMetrics(CollectorRegistry()).of_model("tiny")
        self._line: list[Asked] = []  # those that wait, in their order: all have one key and one priority
        self._estimates = Estimates(self._supply)
        self.admission = Admission(1024, room_timeout_s, self._changed, metrics, self._estimates, self.loop.time)

    def run(self, *clients: Client, for_s: float) -> None:
        """Run the clients for ``for_s`` seconds."""

        async def story() -> None:
            tasks = [asyncio.ensure_future(client(self)) for client in clients]
            tasks.append(asyncio.ensure_future(self._report()))
            await asyncio.sleep(for_s)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.loop.run_until_complete(story())
        self.loop.close()

    def view(self, load: Load) -> WorkerView:
        """A worker as routing sees it."""
        return WorkerView(
            address="w",
            fingerprint=b"",
            num_requests=load.num_requests,
            num_waiting_tokens=load.num_waiting_tokens,
            num_free_blocks=load.num_free_blocks(self.machines.num_blocks),
            num_blocks=self.machines.num_blocks,
            block_size=_BLOCK,
            max_running=self.machines.max_running,
            tokens_per_s=self.machines.prompt_tokens_per_s,
        )

    async def ask(self, work: Work, timeout_s: float = 600.0) -> None:
        """Run one request from its arrival to its end."""
        self._number += 1
        key = (f"r{self._number}", 1)
        asked = Asked(work.num_prompt_tokens, work.max_tokens, work.num_prompt_tokens)
        begun_s = self.loop.time()

        def find() -> bool | None:
            backlogged = not self.view(self.prefill).takes_prompt(2.0)
            tokens = int(self.admission.num_to_hold(asked))
            return None if backlogged or not self.view(self.decode).takes_sequence(tokens) else True

        must_wait = self.admission.num_queued or find() is None
        expected_s = self._estimates.wait_s(asked, self._line, begun_s, is_last=True) if must_wait else 0.0
        self._line.append(asked)
        try:
            await self.admission.place(find, asked, timeout_s, str)
        except UnavailableError as error:
            self.refused.append(str(error))
            return
        finally:
            self._line.remove(asked)
        placed_s = self.loop.time()
        if expected_s is not None:
            self.waited.append(Waited(expected_s, placed_s - begun_s))
        num_output, first_s = 0, None
        self.prefill.open(key, work.num_prompt_tokens, placed_s, is_sent=True, num_to_compute=work.num_prompt_tokens)
        self.decode.open(key, work.num_prompt_tokens, placed_s, is_sent=False, num_to_compute=0)
        try:
            await self._compute(work)
            first_s = self.loop.time()
            self.prefill.on_first_token(key, first_s, self.machines.prompt_tokens_per_s)
            self.decode.on_first_token(key, first_s, None)
            self.prefill.close(key, work.num_prompt_tokens)
            self._changed.set()
            async with self._batch:
                await asyncio.sleep(work.num_output_tokens * self.machines.step_s)
            num_output = work.num_output_tokens
            self.num_served += 1
        finally:
            self.decode.close(key, work.num_prompt_tokens + work.num_output_tokens)
            self.admission.on_end(asked, num_output, first_s)
            self._changed.set()

    async def _compute(self, work: Work) -> None:
        mine = [float(work.num_prompt_tokens)]
        self._prompts.append(mine)
        async with self._computing:
            while mine[0] > 0:
                tokens = min(mine[0], 512.0)
                await asyncio.sleep(tokens / self.machines.prompt_tokens_per_s)
                mine[0] -= tokens
        self._prompts.remove(mine)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            status = Status(
                state=WorkerState.READY,
                num_running=len(self._prompts),
                num_waiting=0,
                num_waiting_tokens=int(sum(one[0] for one in self._prompts)),
                num_free_blocks=self.machines.num_blocks,
                num_blocks=self.machines.num_blocks,
                max_running=self.machines.max_running,
            )
            self.prefill.on_status(status, self.loop.time())
            self._changed.set()

    def _supply(self) -> Supply:
        speed = self.machines.prompt_tokens_per_s
        prefiller = Prefiller(self.prefill.num_waiting_tokens_at(self.loop.time(), speed), speed)
        return Supply.of([prefiller], [self.view(self.decode)], 2.0)


@dataclass
class Mix:
    """A mix of requests, from which one is drawn each time."""

    works: list[Work]
    chance: random.Random = field(default_factory=lambda: random.Random(5))

    def draw(self) -> Work:
        return self.chance.choice(self.works)


def closed(mix: Mix) -> Client:
    """A client that sends its next request when the last one has ended."""

    async def client(world: World) -> None:
        await asyncio.sleep(mix.chance.random())
        while True:
            before_s = world.loop.time()
            await world.ask(mix.draw())
            if world.loop.time() == before_s:
                await asyncio.sleep(1.0)  # refused

    return client


def open_loop(mix: Mix, per_s: float) -> Client:
    """Requests that arrive as a Poisson process."""

    async def clients(world: World) -> None:
        tasks: set[asyncio.Task[None]] = set()
        try:
            while True:
                await asyncio.sleep(mix.chance.expovariate(per_s))
                task = asyncio.ensure_future(world.ask(mix.draw()))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    return clients
