"""Requests with images wait for a worker that reads them, by the rules of the line."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvrelay.common.fair_queue import Flow
from kvrelay.common.images import ImageTexts
from kvrelay.common.model_card import ModelCard
from kvrelay.gateway.errors import (
    AttemptsFailedError,
    InvalidRequestError,
    OverloadedError,
    RequestTimeoutError,
    UnavailableError,
)
from kvrelay.gateway.relay import image_texts
from kvrelay.gateway.relay.image_texts import Patience
from kvrelay.gateway.workers.images import ImageAsker, Readers
from kvrelay.gateway.workers.pool import FoundWorker
from kvrelay.wire.control.server import ControlServer
from kvrelay.wire.messages import AskImages, Role, WorkerState
from kvrelay.wire.metrics import WireMetrics

from ..pictures import seeing_card, telling, texts_of
from ..players import LINKS, Player, Stage, good, leave, queued, stage, until

SIZES = ((8, 6), (30, 2))
BLIND = "its checkpoint has no encoder of images"


def seeing(**settings: Any) -> Any:
    """A relay in front of a decode worker and one prefill worker that reads images."""
    return stage(good, prefill=good, prefill_cards=[seeing_card()], **settings)


async def without_it(on: Stage) -> Player:
    """The prefill worker begins to drain."""
    player = on.players[0]
    player.tell = telling
    await leave(on, player)
    return player


async def restarted(on: Stage, card: ModelCard, tell: Callable[[Player, AskImages], None] = telling) -> None:
    """The prefill worker is lost, and comes back at its address."""
    player = on.players[0]
    await player.server.stop()
    await until(on.pool, lambda: on.pool.prefills[player.address].welcome is None)
    player.card, player.tell = card, tell
    metrics = WireMetrics(CollectorRegistry())
    player.server = ControlServer(player.address, player, LINKS, metrics=metrics, network=player.network)
    await player.server.start()


def asked(on: Stage, patience: Patience | None = None) -> asyncio.Task[ImageTexts]:
    return asyncio.create_task(on.relay.images.texts(SIZES, "tiny", "messages", patience))


async def test_all_that_wait_go_on_when_the_worker_is_back() -> None:
    async with seeing() as on:
        player = await without_it(on)
        patiences = [Patience() for _ in range(3)]
        tasks = [asked(on, patience) for patience in patiences]
        await queued(on, 3)
        player.state = WorkerState.READY
        async with asyncio.timeout(10):
            assert await asyncio.gather(*tasks) == [texts_of(SIZES)] * 3
        assert on.relay.admission.num_queued == 0
        assert all(0 < patience.waited_s < 10 for patience in patiences)


async def test_a_restarted_worker_is_found_soon_and_asked() -> None:
    async with seeing() as on:
        await without_it(on)
        waiting = asked(on)
        await queued(on, 1)
        on.players[0].state = WorkerState.READY
        await restarted(on, seeing_card())
        async with asyncio.timeout(10):
            assert await waiting == texts_of(SIZES)


async def test_the_wait_ends_if_the_worker_comes_back_and_reads_no_images() -> None:
    async with seeing() as on:
        await without_it(on)
        waiting = asked(on)
        await queued(on, 1)
        on.players[0].state = WorkerState.READY
        await restarted(on, seeing_card(BLIND))
        with pytest.raises(InvalidRequestError, match=f"'tiny' reads no images: {BLIND}; send text only"):
            async with asyncio.timeout(10):
                await waiting


async def test_the_time_in_the_line_is_the_bound_and_the_error_names_what_is_missing() -> None:
    async with seeing(room_timeout_s=0.3) as on:
        await without_it(on)
        text = "model 'tiny': no worker that reads images is up; try again later"
        with pytest.raises(OverloadedError, match=text) as caught:
            await asked(on)
        assert caught.value.retry_after_s is not None
        with pytest.raises(OverloadedError, match=text):  # what it has waited before counts
            await asked(on, Patience(waited_s=10.0))
        text = "model 'tiny': no worker that reads images is up; no worker had a place within the request's 0.1 s"
        with pytest.raises(RequestTimeoutError, match=text):
            await asked(on, Patience(timeout_s=0.1))
    async with seeing(request_timeout_s=0.3) as on:
        await without_it(on)
        with pytest.raises(RequestTimeoutError, match=r"the request's 0.3 s"):
            await asked(on)


async def test_the_time_of_asking_is_the_requests_own_and_no_waiting() -> None:
    async with seeing() as on:
        for patience in (Patience(timeout_s=0.6, waited_s=0.3, spent_s=0.2), Patience(timeout_s=0.1)):
            text = f"'tiny': no worker told how to read the images within the request's {patience.timeout_s:g} s"
            waited_s, left_s = patience.waited_s, patience.left_s
            async with asyncio.timeout(10):  # the worker never answers
                with pytest.raises(RequestTimeoutError, match=text):
                    await asked(on, patience)
            assert patience.waited_s == pytest.approx(waited_s, abs=0.01)
            assert patience.left_s <= 0.0 < left_s
    async with seeing(request_timeout_s=0.1) as on:
        async with asyncio.timeout(10):
            with pytest.raises(RequestTimeoutError, match=r"the request's 0.1 s"):
                await asked(on)


async def test_as_many_wait_as_in_the_line_and_smaller_priorities_push_out() -> None:
    async with seeing(max_queued=2) as on:
        player = await without_it(on)
        first, last = asked(on), asked(on, Patience(Flow(priority=5)))
        await queued(on, 2)
        for flow in (Flow(priority=5), Flow(priority=9)):
            with pytest.raises(OverloadedError, match="2 requests wait already"):
                await asked(on, Patience(flow))
            on.relay.admission.check_not_full(flow)  # texts do not wait, so they are not refused
        urgent = asked(on, Patience(Flow(priority=1)))
        with pytest.raises(OverloadedError, match="2 requests wait already"):
            await last
        player.state = WorkerState.READY
        async with asyncio.timeout(10):
            assert await asyncio.gather(first, urgent) == [texts_of(SIZES)] * 2


async def test_so_many_bytes_wait_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_texts, "_MAX_WAITING_BYTES", 3 * 2**20)
    async with seeing() as on:
        player = await without_it(on)
        waiting = asked(on, Patience(num_bytes=2 * 2**20))
        await queued(on, 1)
        with pytest.raises(OverloadedError, match=r"files of 2 MiB wait already .* the limit is 3 MiB"):
            await asked(on, Patience(num_bytes=2 * 2**20))
        more = asked(on, Patience(num_bytes=2**20))
        await queued(on, 2)
        player.state = WorkerState.READY
        await asyncio.gather(waiting, more)
        await without_it(on)
        again = asked(on, Patience(num_bytes=3 * 2**20))
        await queued(on, 1)
        again.cancel()


async def test_smaller_priorities_push_out_others_whose_files_are_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_texts, "_MAX_WAITING_BYTES", 4 * 2**20)
    async with seeing() as on:
        player = await without_it(on)
        staying = [asked(on, Patience(num_bytes=2 * 2**20)), asked(on, Patience(Flow(priority=9)))]
        await queued(on, 2)
        pushed = asked(on, Patience(Flow(priority=5), num_bytes=2 * 2**20))
        await queued(on, 3)
        text = r"files of 4 MiB wait already .* the limit is 4 MiB"
        for refused in (Patience(Flow(priority=5), num_bytes=2**20), Patience(num_bytes=3 * 2**20)):
            with pytest.raises(OverloadedError, match=text):
                await asked(on, refused)
        assert not pushed.done()
        staying.append(asked(on, Patience(num_bytes=2 * 2**20)))
        with pytest.raises(OverloadedError, match=text):
            await pushed
        player.state = WorkerState.READY
        async with asyncio.timeout(10):
            assert await asyncio.gather(*staying) == [texts_of(SIZES)] * 3


async def test_who_leaves_waits_no_longer() -> None:
    async with seeing() as on:
        await without_it(on)
        waiting = asked(on)
        await queued(on, 1)
        waiting.cancel()
        await queued(on, 0)


async def test_a_worker_that_is_lost_when_asked_is_waited_for_but_not_for_ever() -> None:
    async with seeing(max_attempts=2) as on:
        [player, _] = on.players
        restarts: list[asyncio.Task[None]] = []

        def dies(player: Player, asked: AskImages) -> None:
            restarts.append(
                asyncio.create_task(restarted(on, seeing_card(), dies if len(asked.sizes) == 1 else telling))
            )

        player.tell = dies
        async with asyncio.timeout(20):
            assert await asked(on) == texts_of(SIZES)
            player.tell = dies
            with pytest.raises(AttemptsFailedError, match="2 times a worker was lost"):
                await on.relay.images.texts(SIZES[:1], "tiny", "messages")
            await asyncio.gather(*restarts)
        assert len(player.asked) == 2 + 2


async def test_workers_that_start_are_waited_for_and_those_that_never_were_are_not() -> None:
    async with stage(good) as on:
        asker = ImageAsker(on.pool)
        assert asker.readers is Readers.NONE
        decode = FoundWorker(Role.DECODE, on.players[0].address)
        starting = FoundWorker(Role.PREFILL, "tcp://127.0.0.1:1", "pod", accepts=False)
        on.pool.update([decode, starting])
        assert asker.readers is Readers.AWAY
        on.pool.update([decode])  # its pod is replaced
        assert asker.readers is Readers.AWAY
        with pytest.raises(UnavailableError):
            await on.relay.images.texts(SIZES, "tiny", "messages", Patience(waited_s=60.0))


async def test_a_worker_that_never_read_images_is_no_reason_to_wait() -> None:
    """One of two workers of a model that reads none is away."""
    cards = [seeing_card(BLIND)] * 2
    async with stage(good, prefill=[good, good], prefill_cards=cards) as on:
        asker = ImageAsker(on.pool)
        await on.players[0].server.stop()
        await until(on.pool, lambda: on.pool.prefills[on.players[0].address].welcome is None)
        assert asker.readers is Readers.NONE
    async with stage(good, prefill=[good, good], prefill_cards=[seeing_card(), seeing_card(BLIND)]) as on:
        asker = ImageAsker(on.pool)
        await on.players[0].server.stop()
        await until(on.pool, lambda: on.pool.prefills[on.players[0].address].welcome is None)
        assert asker.readers is Readers.AWAY
