"""Prompts with images on real workers over real sockets, from submit to the last token. The test plays the gateway."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry

from kvrelay.common.images import ImageSpan, PromptImage, image_digest
from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.fake.engine import fake_card
from kvrelay.engine.fake.language import expected_output
from kvrelay.wire.control.client import ControlClient
from kvrelay.wire.messages import (
    ABOUT_IMAGES,
    AskImages,
    DecodeTarget,
    Failed,
    FailureCode,
    HandedOver,
    Hello,
    HelloRefused,
    ImagesTold,
    Message,
    Role,
    Submit,
    Tokens,
    Welcome,
)
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.network import Network
from tests.images import png, reader, with_images
from tests.relay.workers import LINKS, assert_nothing_held, decode_worker, prefill_worker

VOCAB = 1000
WAIT_S = 30.0


class PlayedGateway:
    """Implements ClientHandler, for its links to both workers."""

    def __init__(self) -> None:
        self.prefill: ControlClient
        self.decode_address = ""
        self.news: asyncio.Queue[Message | Welcome] = asyncio.Queue()

    def on_welcome(self, welcome: Welcome) -> None:
        self.news.put_nowait(welcome)

    def on_message(self, message: Message) -> None:
        self.news.put_nowait(message)

    def on_lost(self, reason: str) -> None:
        raise AssertionError(reason)

    def on_refused(self, refused: HelloRefused) -> None:
        raise AssertionError(refused.detail)

    async def next(self, *kinds: type) -> Message:
        """The next message of these types."""
        async with asyncio.timeout(WAIT_S):
            while True:
                message = await self.news.get()
                if isinstance(message, kinds):
                    return message

    async def generate(
        self, name: str, token_ids: list[int], images: Sequence[PromptImage], output: Sequence[int] = (), most: int = 12
    ) -> tuple[list[int], int | None]:
        """Submit a request, and return all of its output and the cached tokens."""
        submit = Submit(
            request_id=name,
            attempt=1,
            token_ids=[*token_ids, *output],
            num_prompt_tokens=len(token_ids),
            sampling=SamplingParams(max_tokens=most, temperature=0.0),
            decode=DecodeTarget(address=self.decode_address),
            images=list(images),
        )
        assert self.prefill.send(submit)
        found, num_cached = list(output), None
        while True:
            message = await self.next(Tokens, Failed)
            assert isinstance(message, Tokens), message
            for item in message.items:
                num_cached = item.num_cached_tokens if num_cached is None else num_cached
                found[item.index :] = [token.token_id for token in item.tokens]
                if item.finish_reason is not None:
                    return found, num_cached


@asynccontextmanager
async def pair(
    *, takes_whole: bool = False, num_blocks: int = 64, begins: threading.Event | None = None
) -> AsyncIterator[PlayedGateway]:
    """A prefill worker that reads images, a decode worker that does not, and a gateway. ``begins``: lets the latter compute."""
    prefill = prefill_worker(
        card=fake_card(no_images="", num_blocks=num_blocks), images=reader(takes_whole=takes_whole)
    )
    on_step = None if begins is None else lambda _: begins.wait(WAIT_S)
    decode = decode_worker(card=fake_card(num_blocks=num_blocks), on_step=on_step)
    network, gateway, links = Network.open(), PlayedGateway(), list[ControlClient]()
    for worker in (prefill, decode):
        await worker.start()
        hello = Hello(role=Role.GATEWAY, peer_id="gateway")
        metrics = WireMetrics(CollectorRegistry())
        links.append(ControlClient(worker.address, hello, gateway, LINKS, metrics=metrics, network=network))
        links[-1].start()
        await gateway.next(Welcome)
    gateway.prefill, gateway.decode_address = links[0], decode.address
    try:
        yield gateway
    finally:
        for link in links:
            await link.stop()
        for worker in (prefill, decode):
            await worker.drain()
            await worker.stop()
            assert_nothing_held(worker)
        await asyncio.to_thread(network.close)


async def test_images_are_handed_over_and_second_turns_are_cached() -> None:
    token_ids, images = with_images([11, 12, 13], png(128, 128, 1), [14, 15, 16], png(128, 128, 2), [17])
    async with pair() as gateway:
        expected = expected_output(token_ids, 12, VOCAB, images=[one.span for one in images])
        assert await gateway.generate("a", token_ids, images) == (expected, 0)
        second = [*token_ids, *expected, 18, 19]
        output, num_cached = await gateway.generate("b", second, images)
        assert output == expected_output(second, 12, VOCAB, images=[one.span for one in images])
        assert num_cached == 16  # of 17 prompt tokens, in blocks of 4
        # Another image of the same size, in the same place.
        other_ids, others = with_images([11, 12, 13], png(128, 128, 1), [14, 15, 16], png(128, 128, 3), [17])
        assert other_ids == token_ids
        output, num_cached = await gateway.generate("c", other_ids, others)
        assert output == expected_output(other_ids, 12, VOCAB, images=[one.span for one in others]) != expected
        assert num_cached == 8
        # A later attempt goes on after what the first one gave.
        output, _ = await gateway.generate("d", token_ids, images, expected[:5])
        assert output == expected


async def test_an_image_of_20_mb_passes() -> None:
    data = png(128, 128)
    large = data[:-12] + bytes(20 * 10**6) + data[-12:]
    token_ids, [image] = with_images([11, 12, 13], data)
    image = PromptImage(ImageSpan(image.span.start, image.span.stop, image_digest(large)), large)
    async with pair() as gateway:
        output, _ = await gateway.generate("a", token_ids, [image])
        assert output == expected_output(token_ids, 12, VOCAB, images=[image.span])


async def test_whole_images_are_handed_over_like_others() -> None:
    token_ids, images = with_images([11] * 30, png(128, 128, 1), [14, 15, 16], png(128, 128, 2), [17] * 9)
    async with pair(takes_whole=True) as gateway:
        output, _ = await gateway.generate("a", token_ids, images)
        assert output == expected_output(token_ids, 12, VOCAB, images=[one.span for one in images])


async def test_questions_and_bad_images_are_answered() -> None:
    async with pair() as gateway:
        assert gateway.prefill.send(AskImages(query=5, sizes=[(128, 128)]))
        told = await gateway.next(ImagesTold)
        assert isinstance(told, ImagesTold)
        assert told.told is not None
        assert told.told.texts[0].num_placeholders == 4
        token_ids, images = with_images([11], b"GIF89")
        submit = Submit(
            request_id="a",
            attempt=1,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            sampling=SamplingParams(max_tokens=2),
            decode=DecodeTarget(address=gateway.decode_address),
            images=images,
        )
        assert gateway.prefill.send(submit)
        failed = await gateway.next(Failed)
        assert isinstance(failed, Failed)
        assert (failed.code, failed.about) == (FailureCode.INVALID, ABOUT_IMAGES)


async def test_a_full_decode_worker_ends_requests_with_images_and_they_can_be_sent_again() -> None:
    """Requests that lose their blocks fail for lack of room. They go on over the prefill worker, as a gateway sends them."""
    token_ids, images = with_images([11, 12, 13], png(128, 128, 1), [14, 15])
    expected = expected_output(token_ids, 40, VOCAB, images=[one.span for one in images])
    begins = threading.Event()  # when the decode worker has all requests, which together need twice its blocks
    async with pair(num_blocks=24, begins=begins) as gateway:

        def send(name: str, attempt: int, output: list[int]) -> None:
            submit = Submit(
                request_id=name,
                attempt=attempt,
                token_ids=[*token_ids, *output],
                num_prompt_tokens=len(token_ids),
                sampling=SamplingParams(max_tokens=40, temperature=0.0),
                decode=DecodeTarget(address=gateway.decode_address),
                images=images,
            )
            assert gateway.prefill.send(submit)

        outputs: dict[str, list[int]] = {f"r{index}": [] for index in range(4)}
        attempts, running, codes = dict.fromkeys(outputs, 1), set(outputs), list[FailureCode]()
        for name in outputs:
            send(name, 1, [])
        num_handed_over = 0
        while running:
            message = await gateway.next(Tokens, HandedOver, Failed)
            if isinstance(message, HandedOver):
                num_handed_over += 1
                if num_handed_over == len(outputs):
                    begins.set()
                continue
            if isinstance(message, Failed):
                if (message.request_id, message.attempt) in attempts.items():
                    codes.append(message.code)
                    attempts[message.request_id] += 1
                    await asyncio.sleep(0.01)
                    send(message.request_id, attempts[message.request_id], outputs[message.request_id])
                continue
            assert isinstance(message, Tokens)
            for item in message.items:
                outputs[item.request_id][item.index :] = [token.token_id for token in item.tokens]
                if item.finish_reason is not None:
                    running.discard(item.request_id)
        assert set(codes) == {FailureCode.NO_ROOM}
        assert all(output == expected for output in outputs.values())
