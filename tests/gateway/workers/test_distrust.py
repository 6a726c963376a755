"""Workers that report that they compute wrongly. They get no requests, theirs move, and decode workers are told."""

from __future__ import annotations

import asyncio

from kvrelay.wire.messages import Distrust, Message, Role, Submit, WorkerState
from kvrelay.wire.network import Network

from ..players import ALL, Player, Stage, good, stage, until
from .test_workers import found


class Hears(Player):
    """A decode worker that keeps the peer ids of Distrust messages."""

    def __init__(self, network: Network) -> None:
        super().__init__(Role.DECODE, good, network)
        self.heard: asyncio.Queue[str] = asyncio.Queue()

    def on_message(self, peer_id: str, role: Role, message: Message) -> None:
        if isinstance(message, Distrust):
            self.heard.put_nowait(message.peer_id)
        super().on_message(peer_id, role, message)


async def found_wrong(on: Stage, player: Player) -> None:
    """The player reports that it computes wrongly. Waits until the gateway knows it."""
    player.state = WorkerState.WRONG
    worker = on.pool._of(player.role)[player.address]
    await until(on.pool, lambda: worker.is_wrong)
    assert not worker.is_usable


def distrusted(on: Stage, role: Role) -> float | None:
    labels = {"model": "tiny", "role": role.value}
    return on.metrics.registry.get_sample_value("kvrelay_distrusted_workers_total", labels)


async def test_it_gets_nothing_and_is_counted_once() -> None:
    async with stage(good, good) as on:
        wrong, right = on.players
        assert distrusted(on, Role.DECODE) == 0
        await found_wrong(on, wrong)
        assert [await on.run(request_id=name) for name in "abc"] == [ALL] * 3
        assert (len(wrong.submits), len(right.submits)) == (0, 3)
        assert (distrusted(on, Role.DECODE), distrusted(on, Role.PREFILL)) == (1, 0)


async def test_the_only_one_is_named_as_the_reason_not_to_be_ready() -> None:
    async with stage(good) as on:
        await found_wrong(on, on.players[0])
        assert on.pool.not_ready() == ["no decode worker is up (it computes wrongly)"]


async def test_what_runs_there_goes_on_elsewhere() -> None:
    begun: asyncio.Queue[Player] = asyncio.Queue()

    def begin(player: Player, submit: Submit) -> None:
        if player.state is WorkerState.READY and begun.empty() and len(submit.token_ids) == submit.num_prompt_tokens:
            player.tokens(submit, 0, [100])
            begun.put_nowait(player)
        else:
            good(player, submit)

    async with stage(begin, begin) as on:
        running = asyncio.create_task(on.run())
        async with asyncio.timeout(20):
            player = await begun.get()
            begun.put_nowait(player)
            await found_wrong(on, player)
            assert await running == ALL
        assert [len(one.submits) for one in on.players] == [1, 1]


async def test_decode_workers_hear_of_a_prefill_worker_also_those_that_connect_later() -> None:
    network = Network.open()
    first, later = Hears(network), Hears(network)
    async with stage(good, prefill=good) as on:
        try:
            for player in (first, later):
                player.address = await player.server.start()
            prefill, plain = on.players
            await connect(on, prefill, plain, first)
            await found_wrong(on, prefill)
            async with asyncio.timeout(20):
                assert await first.heard.get() == "w-1"
                await connect(on, prefill, plain, first, later)
                assert await later.heard.get() == "w-1"
            assert first.heard.empty()
            assert distrusted(on, Role.PREFILL) == 1
        finally:
            on.pool.update([])
            for player in (first, later):
                await player.server.stop()
            await asyncio.to_thread(network.close)


async def test_of_a_decode_worker_nobody_needs_to_hear() -> None:
    network = Network.open()
    other = Hears(network)
    async with stage(good) as on:
        try:
            other.address = await other.server.start()
            await connect(on, *on.players, other)
            await found_wrong(on, on.players[0])
            assert await on.run() == ALL  # any Distrust would have arrived before
            assert other.heard.empty()
        finally:
            on.pool.update([])
            await other.server.stop()
            await asyncio.to_thread(network.close)


async def connect(on: Stage, *players: Player) -> None:
    """Make these the pool's workers, and wait until all are up."""
    on.pool.update(found(*players))
    await until(on.pool, lambda: all(worker.welcome is not None for worker in on.pool.workers))
