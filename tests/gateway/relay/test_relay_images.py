"""Requests with images: they go over prefill workers that read images, in every attempt."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvrelay.common.fair_queue import Flow
from kvrelay.common.images import ImageSpan, PromptImage, image_digest
from kvrelay.gateway.errors import InvalidRequestError, OverloadedError, RequestTimeoutError, UnavailableError
from kvrelay.gateway.relay.placement import Placement
from kvrelay.gateway.relay.request import GenerationRequest, PromptShare
from kvrelay.wire.messages import ABOUT_IMAGES, FailureCode, HandedOver, Preempted, Submit, Timings, WorkerState

from ..pictures import seeing_card
from ..players import ALL, Player, Stage, asking, failing, good, in_turn, leave, queued, stage, until

DATA = b"a file" * 100
IMAGES = (PromptImage(ImageSpan(1, 3, image_digest(DATA)), DATA),)
SEEING, BLIND = seeing_card(), seeing_card("the model reads text only")


def picture(request_id: str = "r", **more: Any) -> GenerationRequest:
    request = asking(request_id=request_id, **more)
    request.images = IMAGES
    return request


async def output(on: Stage, request: GenerationRequest) -> list[int]:
    return [token.token_id for delta in await on.deltas(request) for token in delta.tokens]


async def prefer_decode(on: Stage) -> None:
    """Decode workers are idle and fast, and prefill workers slow."""
    for player in on.players:
        player.prompt_tokens_per_s = 1e9 if player.role == "decode" else 1e3
    await until(on.pool, lambda: all(worker.tokens_per_s is not None for worker in on.pool.workers))


async def test_images_are_sent_in_every_attempt() -> None:
    script = failing(FailureCode.INTERNAL, after=2, times=1, retry_after_s=0.0)
    async with stage(good, prefill=script, prefill_cards=[SEEING], local_prefill="sooner") as on:
        await prefer_decode(on)
        assert await output(on, picture()) == ALL[0]
        first, second = on.players[0].submits
        assert (first.images, second.images) == (list(IMAGES), list(IMAGES))
        assert (second.num_prompt_tokens, len(second.token_ids)) == (3, 5)
        assert [submit.decode is not None for submit in on.players[0].submits] == [True, True]
        assert on.players[1].submits == []
        assert await output(on, asking(request_id="text")) == ALL[0]
        assert [submit.images for submit in on.players[1].submits] == [[]]  # as the decode worker is faster


async def test_a_decode_worker_that_lost_the_blocks_gets_them_anew_through_a_prefill_worker() -> None:
    """It cannot compute images. It gives the request up when it runs out of room, with what it has generated."""

    def decodes(player: Player, submit: Submit) -> None:
        decode = on.players[1]
        decode.gateway_id = player.gateway_id
        player.tokens(submit, 0, [100], timings=Timings(prefill_s=0.1))
        player.say(HandedOver(request_id=submit.request_id, attempt=submit.attempt))
        decode.tokens(submit, 0, [100, 101], timings=Timings(transfer_s=0.1))
        decode.fail(submit, FailureCode.NO_ROOM, 0.0)

    async with stage(good, prefill=in_turn(decodes, good), prefill_cards=[SEEING]) as on:
        assert await output(on, picture()) == ALL[0]
        first, second = on.players[0].submits
        assert second.token_ids == [*first.token_ids, 100, 101]
        assert second.images == list(IMAGES)
        assert on.players[1].submits == []


async def test_a_preempted_request_moves_through_a_prefill_worker() -> None:
    def preempted(player: Player, submit: Submit) -> None:
        player.tokens(submit, 0, [100])
        [decode] = [one for one in on.players if submit.decode is not None and one.address == submit.decode.address]
        decode.gateway_id = player.gateway_id
        decode.say(Preempted(request_id=submit.request_id, attempt=submit.attempt))

    async with stage(good, good, prefill=in_turn(preempted, good), prefill_cards=[SEEING]) as on:
        await prefer_decode(on)
        assert await output(on, picture()) == ALL[0]
        decodes = [submit.decode.address for submit in on.players[0].submits if submit.decode is not None]
        assert len(set(decodes)) == 2
        assert [len(player.submits) for player in on.players] == [2, 0, 0]


async def test_a_prompt_with_images_is_not_taken_back() -> None:
    async with stage(good, prefill=good, prefill_cards=[SEEING], local_prefill="sooner") as on:
        await prefer_decode(on)
        placement = Placement(on.pool, on.relay.settings, on.relay.breakers, on.relay.clock)
        worker, key = on.pool.prefills[on.players[0].address], ("r", 1)
        assert worker.load is not None
        worker.load.open(key, 1000, on.relay.clock(), is_sent=True, num_to_compute=1000)
        requests = [asking(), picture()]
        for request in requests:
            request.prefix = placement.prefix_of(request)
        assert [placement.sooner(request, worker, key) is None for request in requests] == [False, True]


async def test_only_workers_that_read_images_get_them() -> None:
    async with stage(good, prefill=[good] * 3, prefill_cards=[BLIND, SEEING, BLIND]) as on:
        for number in range(6):
            assert await output(on, picture(f"r{number}")) == ALL[0]
        assert [len(player.submits) for player in on.players] == [0, 6, 0, 0]
        for number in range(6):
            assert await output(on, asking(request_id=f"t{number}")) == ALL[0]
        assert all(player.submits for player in on.players[:3])


async def test_a_request_whose_worker_is_away_stands_beside_the_line() -> None:
    """Texts pass it, which decode workers can compute. It has the time that it has waited less."""
    async with stage(good, prefill=good, prefill_cards=[SEEING]) as on:
        [player, _] = on.players
        await leave(on, player)
        waiting = asyncio.create_task(output(on, picture(timeout_s=30.0)))
        await queued(on, 1)
        assert await output(on, asking(request_id="text")) == ALL[0]
        assert not waiting.done()
        player.state = WorkerState.READY
        assert await waiting == ALL[0]
        [submit] = player.submits
        assert submit.images == list(IMAGES)
        assert submit.timeout_s is not None
        assert submit.timeout_s < 30.0
        assert on.relay.admission.num_queued == 0


def is_full(on: Stage) -> bool:
    try:
        on.relay.admission.check_not_full(Flow())
    except OverloadedError:
        return True
    return False


@pytest.mark.parametrize("num_before", [0, 1])
async def test_a_request_leaves_the_line_to_texts_when_its_worker_goes(num_before: int) -> None:
    """Also before its turn."""
    cards, limits = {"prefill_cards": [SEEING]}, {"room_timeout_s": 20.0, "max_queued": num_before + 1}
    async with stage(good, prefill=good, **cards, **limits) as on:
        prefill, decode = on.players
        other = on.pool.decodes[decode.address]
        decode.num_free_blocks, decode.num_running = 0, 1
        await until(on.pool, lambda: other.status is not None and other.status.num_free_blocks == 0)
        texts = [asyncio.create_task(output(on, asking(request_id="first"))) for _ in range(num_before)]
        waiting = asyncio.create_task(output(on, picture()))
        await queued(on, num_before + 1)
        assert is_full(on)
        await leave(on, prefill)
        async with asyncio.timeout(10):
            while is_full(on):
                await asyncio.sleep(0.001)  # polls for a state
        texts.append(asyncio.create_task(output(on, asking(request_id="second"))))
        await queued(on, num_before + 2)
        decode.num_free_blocks, decode.num_running = 64, 0
        assert await asyncio.gather(*texts) == [ALL[0]] * len(texts)
        assert not waiting.done()
        prefill.state = WorkerState.READY
        assert await waiting == ALL[0]


async def test_the_time_before_it_was_a_request_counts() -> None:
    async with stage(good, prefill=good, prefill_cards=[SEEING], room_timeout_s=5.0) as on:
        request = picture(timeout_s=30.0)
        request.waited_s = 4.0
        assert await output(on, request) == ALL[0]
        assert on.players[0].submits[0].timeout_s == pytest.approx(26.0, abs=1.0)
        await leave(on, on.players[0])
        for timeout_s, waited_s, error in ((30.0, 4.95, OverloadedError), (4.0, 3.95, RequestTimeoutError)):
            late = picture(timeout_s=timeout_s)
            late.waited_s = waited_s
            async with asyncio.timeout(3):
                with pytest.raises(error, match="no worker that reads images is up"):
                    await on.deltas(late)


async def test_the_time_of_fetching_counts_but_is_no_waiting_for_a_worker() -> None:
    async with stage(good, prefill=good, prefill_cards=[SEEING], room_timeout_s=2.0) as on:
        request = picture(timeout_s=30.0)
        request.spent_s = 4.0
        assert await output(on, request) == ALL[0]
        [player, _] = on.players
        assert player.submits[0].timeout_s == pytest.approx(26.0, abs=1.0)
        sample = on.metrics.registry.get_sample_value
        assert sample("kvrelay_admission_wait_seconds_count", {"model": "tiny"}) == 0
        await leave(on, player)
        late = picture(timeout_s=4.2)
        late.spent_s = 4.0
        with pytest.raises(RequestTimeoutError, match=r"within the request's 4.2 s"):
            await on.deltas(late)
        request = picture("again", timeout_s=30.0)
        request.spent_s = 4.0
        waiting = asyncio.create_task(output(on, request))
        await queued(on, 1)
        player.state = WorkerState.READY
        assert await waiting == ALL[0]


@pytest.mark.parametrize("cards", [[], [BLIND]])
async def test_decode_workers_that_read_images_compute_them_if_no_prefill_worker_does(cards: list[Any]) -> None:
    on_decode = [BLIND, SEEING, BLIND]
    async with stage(good, good, good, prefill=[good] * len(cards), prefill_cards=cards, decode_cards=on_decode) as on:
        for number in range(3):
            assert await output(on, picture(f"r{number}")) == ALL[0]
        assert [len(player.submits) for player in on.players] == [0] * len(cards) + [0, 3, 0]
        submits = [submit for player in on.players for submit in player.submits]
        assert [(submit.images, submit.decode) for submit in submits] == [(list(IMAGES), None)] * 3


async def test_decode_workers_that_must_compute_no_prompts_get_no_images() -> None:
    async with stage(good, needs_prefill_workers=True, decode_cards=[SEEING], room_timeout_s=0.05) as on:
        with pytest.raises(UnavailableError, match="no worker that reads images is up"):
            await on.deltas(picture())
        assert not on.players[0].submits


async def test_images_go_over_prefill_workers_as_long_as_one_reads_them() -> None:
    async with stage(good, prefill=good, prefill_cards=[SEEING], decode_cards=[SEEING], local_prefill="sooner") as on:
        await prefer_decode(on)
        assert await output(on, picture("a")) == ALL[0]
        assert [len(player.submits) for player in on.players] == [1, 0]
        on.pool.prefills[on.players[0].address].on_lost("its machine is gone")
        assert await output(on, picture("b")) == ALL[0]
        assert [len(player.submits) for player in on.players] == [1, 1]


@pytest.mark.parametrize("reads", [True, False])
async def test_further_choices_are_computed_where_the_first_one_is(reads: bool) -> None:
    """They share its prompt, whose last tokens may be an image's."""

    def hands_over(player: Player, submit: Submit) -> None:
        player.tokens(submit, 0, [100], timings=Timings(prefill_s=0.1, transfer_s=0.1))
        player.tokens(submit, 1, [101, 102, 103], ALL[1])

    cards = {"prefill_cards": [SEEING], "decode_cards": [SEEING if reads else BLIND]}
    async with stage(good, prefill=hands_over, local_prefill="sooner", **cards) as on:
        await prefer_decode(on)
        share, choices = PromptShare(), [picture(f"r{choice}", choice=choice) for choice in range(3)]
        for request in choices:
            request.share = share
        assert await asyncio.gather(*(output(on, request) for request in choices)) == [ALL[0]] * 3
        assert [len(player.submits) for player in on.players] == ([1, 2] if reads else [3, 0])
        assert all(submit.images == list(IMAGES) for player in on.players for submit in player.submits)
        assert len({id(request.images[0].data) for request in choices}) == 1


async def test_an_image_that_cannot_be_read_is_the_clients_fault() -> None:
    def refuses(player: Player, submit: Submit) -> None:
        player.fail(submit, FailureCode.INVALID, about=ABOUT_IMAGES)

    async with stage(good, prefill=refuses, prefill_cards=[SEEING]) as on:
        with pytest.raises(InvalidRequestError, match="scripted"):
            await on.deltas(picture())
        assert [len(player.submits) for player in on.players] == [1, 0]
        assert on.relay.breakers.states() == {}


async def test_no_log_line_holds_an_image() -> None:
    request = picture()
    assert "a file" not in repr(request)
    submit = Submit(
        request_id="r", attempt=1, token_ids=[1], num_prompt_tokens=1, sampling=request.sampling, images=list(IMAGES)
    )
    assert "a file" not in repr(submit)
    assert "600 bytes" in repr(submit)
