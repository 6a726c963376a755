"""Asking workers what stands in the place of images."""

from __future__ import annotations

import asyncio

import pytest

from kvrelay.common.model_card import IMAGES_OFF
from kvrelay.gateway.errors import InvalidRequestError, UnavailableError
from kvrelay.gateway.workers import images
from kvrelay.gateway.workers.images import ImageAsker, Readers
from kvrelay.gateway.workers.pool import static_workers
from kvrelay.wire.messages import AskImages, ImagesTold, Role

from ...ports import reserved_port
from ..pictures import seeing_card, telling, texts_of
from ..players import Player, Stage, good, leave, stage

SIZES = ((8, 6), (30, 2))
WHERE = "messages[0].content[1]"
BLIND = seeing_card("its checkpoint has no encoder of images")


def seers(on: Stage) -> list[Player]:
    players = [player for player in on.players if player.role is Role.PREFILL]
    for player in players:
        player.tell = telling
    return players


async def test_an_answer_is_remembered_while_its_worker_is_up() -> None:
    async with stage(good, prefill=good, prefill_cards=[seeing_card()]) as on:
        [player], asker = seers(on), ImageAsker(on.pool)
        for _ in range(3):
            assert await asker.texts(SIZES, "tiny", WHERE) == texts_of(SIZES)
        assert [asked.sizes for asked in player.asked] == [list(SIZES)]
        assert await asker.texts(SIZES[:1], "tiny", WHERE) == texts_of(SIZES[:1])
        assert len(player.asked) == 2
        on.pool.prefills[player.address].on_lost("it restarts")
        assert await asker.texts(SIZES, "tiny", WHERE) is None
        assert len(player.asked) == 2


async def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_MAX_ANSWERS", 2)
    async with stage(good, prefill=good, prefill_cards=[seeing_card()]) as on:
        [player], asker = seers(on), ImageAsker(on.pool)
        a, b, c = (((width, 1),) for width in (1, 2, 3))
        for sizes in (a, b, a, c, a, b):  # c comes in the place of b, which was used longest ago
            await asker.texts(sizes, "tiny", WHERE)
        assert [tuple(asked.sizes) for asked in player.asked] == [a, b, c, b]
        monkeypatch.setattr(images, "_MAX_CHARS", 1)
        await asker.texts(c, "tiny", WHERE)
        await asker.texts(c, "tiny", WHERE)
        assert len(player.asked) == 6


def nothing(player: Player, asked: AskImages) -> None:
    pass


def unusable(player: Player, asked: AskImages) -> None:
    player.say(ImagesTold(query=asked.query, told=texts_of(asked.sizes[1:])))


@pytest.mark.parametrize("tell", [nothing, unusable])
async def test_another_worker_is_asked_if_one_gives_no_answer(monkeypatch: pytest.MonkeyPatch, tell: object) -> None:
    monkeypatch.setattr(images, "_ANSWER_S", 0.2)
    async with stage(good, prefill=[good, good], prefill_cards=[seeing_card()] * 2) as on:
        first, second = seers(on)
        first.tell = nothing if tell is nothing else unusable
        for _ in range(2):  # another one is asked first each time
            assert await ImageAsker(on.pool).texts(SIZES, "tiny", WHERE) == texts_of(SIZES)
        second.tell = first.tell
        with pytest.raises(UnavailableError, match="'tiny': no worker tells how to read the images"):
            await ImageAsker(on.pool).texts(SIZES, "tiny", WHERE)


async def test_a_worker_that_is_taken_off_the_list_while_it_is_asked_is_lost() -> None:
    """As when an upgrade replaces its pod: the next one is waited for."""
    async with stage(good, prefill=good, prefill_cards=[seeing_card()]) as on:
        player, decode = on.players
        asking = asyncio.create_task(ImageAsker(on.pool).texts(SIZES, "tiny", WHERE))
        while not player.asked:
            await asyncio.sleep(0.001)  # polls for a state
        on.pool.update(static_workers([], [decode.address]))
        assert await asyncio.wait_for(asking, 4) is None


async def test_an_answer_nobody_waits_for_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    async with stage(good, prefill=good, prefill_cards=[seeing_card()]) as on:
        [player] = seers(on)
        player.tell = lambda player, asked: [telling(player, asked) for _ in range(2)] and None
        worker = on.pool.prefills[player.address]
        given_up = worker.ask_images(SIZES)
        given_up.cancel()
        assert await worker.ask_images(SIZES) is not None
        assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_problem_is_the_clients() -> None:
    async with stage(good, prefill=good, prefill_cards=[seeing_card()]) as on:
        [player], asker = seers(on), ImageAsker(on.pool)
        player.tell = lambda player, asked: player.say(ImagesTold(query=asked.query, problem="image 1 is too thin"))
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match="image 1 is too thin") as caught:
                await asker.texts(SIZES, "tiny", WHERE)
            assert caught.value.param == WHERE


async def test_why_a_model_reads_no_images() -> None:
    async with stage(good, prefill=good, prefill_cards=[BLIND]) as on:
        text = "model 'tiny' reads no images: its checkpoint has no encoder of images; send text only"
        with pytest.raises(InvalidRequestError, match=text) as caught:
            await on.relay.images.texts(SIZES, "tiny", WHERE)
        assert caught.value.param == WHERE
    async with stage(good, decode_cards=[seeing_card(IMAGES_OFF)]) as on:
        with pytest.raises(InvalidRequestError, match=f"reads no images: {IMAGES_OFF}; send text only"):
            await on.relay.images.texts(SIZES, "tiny", WHERE)


async def test_a_worker_that_has_not_answered_yet_may_read_images() -> None:
    """A gateway that has just started knows one worker, which reads no images, and the address of another one."""
    async with stage(good, prefill=good, prefill_cards=[BLIND], room_timeout_s=0.1) as on:
        asker = ImageAsker(on.pool)
        assert asker.readers is Readers.NONE
        addresses = [player.address for player in on.players]
        with reserved_port() as port:
            on.pool.update(static_workers([addresses[0], f"tcp://127.0.0.1:{port}"], addresses[1:]))
            assert asker.readers is Readers.AWAY
            with pytest.raises(UnavailableError, match="no worker that reads images is up") as caught:
                await on.relay.images.texts(SIZES, "tiny", WHERE)
        assert caught.value.retry_after_s is not None


async def test_decode_workers_are_asked_if_no_prefill_worker_reads_images() -> None:
    for prefill, cards in (((), ()), (good, [BLIND]), (good, [seeing_card()])):
        async with stage(good, good, prefill=prefill, prefill_cards=cards, decode_cards=[BLIND, seeing_card()]) as on:
            for player in on.players:
                player.tell = telling
            assert await ImageAsker(on.pool).texts(SIZES, "tiny", WHERE) == texts_of(SIZES)
            [asked] = [player for player in on.players if player.asked]
            assert asked is (on.players[0] if cards == [seeing_card()] else on.players[-1])


async def test_workers_that_are_not_usable_now_are_worth_another_try() -> None:
    async with stage(good, prefill=good, prefill_cards=[seeing_card()], room_timeout_s=0.1) as on:
        [player] = seers(on)
        await leave(on, player)
        with pytest.raises(UnavailableError, match="no worker that reads images is up") as caught:
            await on.relay.images.texts(SIZES, "tiny", WHERE)
        assert caught.value.retry_after_s is not None
