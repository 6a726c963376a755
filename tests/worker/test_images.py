"""Reading images beside the asyncio loop: order, bounds on memory, and ends in every state. The test plays the threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import kvrelay.worker.images
from kvrelay.common.images import ImageSpan, PromptImage
from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.fake.images import FakeImageReader
from kvrelay.engine.images.interface import ReadImages
from kvrelay.wire.errors import MalformedMessageError
from kvrelay.wire.messages import AskImages, FailureCode, ImagesTold, Submit
from kvrelay.worker.images import ImageDesk, ImageProblem
from tests.images import PlayedThreads, png, reader, with_images


class Desk(ImageDesk):
    """A desk whose threads the test plays."""

    def __init__(self, images: FakeImageReader | None = None, no_images: str = "") -> None:
        self.played = PlayedThreads()
        self.taken: list[ReadImages | ImageProblem] = []

        def on_loop(call: Callable[..., object], *args: Any) -> None:
            call(*args)

        super().__init__(images or reader(), on_loop, no_images, self.played)

    def begin(self, data: bytes) -> kvrelay.worker.images.Reading:
        """Begin to read a prompt with one image."""
        token_ids, images = with_images([1, 2], data)
        return self.read(token_ids, len(token_ids), images, self.taken.append)


def submit(data: bytes = b"") -> Submit:
    token_ids, images = with_images([1, 2], data or png(128, 128))
    sampling = SamplingParams(max_tokens=1)
    return Submit(
        request_id="r",
        attempt=1,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling=sampling,
        images=images,
    )


def test_prompts_are_read_in_order_one_at_a_time() -> None:
    desk = Desk()
    files = [png(128, 128, shade) for shade in range(3)]
    readings = [desk.begin(data) for data in files]
    assert desk.taken == []
    for count in (1, 2, 3):
        assert desk.played.run(1) == 1
        assert len(desk.taken) == count
    for found, reading in zip(desk.taken, readings, strict=True):
        assert isinstance(found, ReadImages)
        assert found.spans[0].start == 2
        assert reading.images == ()  # the files are free
    assert len({found.spans[0].digest for found in desk.taken if isinstance(found, ReadImages)}) == 3


def test_no_more_is_read_while_much_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvrelay.worker.images, "_MAX_READ_NBYTES", 32)  # two prompts of the fake reader
    desk = Desk()
    readings = [desk.begin(png(128, 128, shade)) for shade in range(4)]
    desk.played.run()
    assert len(desk.taken) == 2
    desk.end(readings[3])  # still waits
    desk.end(readings[0])
    desk.played.run()
    assert len(desk.taken) == 3
    for reading in readings[1:3]:
        desk.end(reading)
    assert desk._read_nbytes == desk._files_nbytes == 0


def test_prompts_are_refused_while_many_files_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    data = png(128, 128)
    monkeypatch.setattr(kvrelay.worker.images, "_MAX_FILES_NBYTES", 2 * len(data))
    desk = Desk()
    readings = [desk.begin(data) for _ in range(2)]
    refusal = desk.refusal(submit())
    assert refusal is not None
    assert refusal.code is FailureCode.QUEUE_FULL
    desk.end(readings[0])  # it is being read
    assert desk.refusal(submit()) is not None
    desk.end(readings[1])
    assert desk.refusal(submit()) is None
    desk.played.run()
    assert desk.taken == []
    assert desk._files_nbytes == 0


def test_a_wrong_digest_or_a_broken_file_is_the_requests_fault() -> None:
    desk = Desk()
    token_ids, [image] = with_images([1, 2], png(128, 128))
    wrong = PromptImage(ImageSpan(image.span.start, image.span.stop, bytes(16)), image.data)
    desk.read(token_ids, len(token_ids), [wrong], desk.taken.append)
    desk.begin(png(128, 128)[:-5])
    desk.begin(b"no image")
    desk.played.run()
    problems = [found for found in desk.taken if isinstance(found, ImageProblem) and found.is_invalid]
    assert [problem.detail for problem in problems] == [
        "image 0 does not have the digest that came with it",
        "image 0 is cut off",
        "image 0 is no PNG, JPEG, WebP or GIF file",
    ]


def test_a_readers_own_error_is_not_the_requests_fault() -> None:
    class Broken(FakeImageReader):
        def read(self, *args: Any) -> ReadImages:
            raise MemoryError

    desk = Desk(Broken())
    desk.begin(png(128, 128))
    desk.played.run()
    assert desk.taken == [ImageProblem("the images could not be read: MemoryError", is_invalid=False)]


def test_questions_about_sizes_do_not_wait_for_images() -> None:
    desk, told = Desk(), []
    desk.answer(AskImages(query=7, sizes=[(128, 128), (1, 64)]), told.append)
    desk.played.run()
    [answer] = told
    assert answer.query == 7
    assert answer.told is not None
    assert [one.num_placeholders for one in answer.told.texts] == [4, 1]
    desk.answer(AskImages(query=8, sizes=[(0, 5)]), told.append)
    desk.played.run()
    assert told[1] == ImagesTold(query=8, problem="an image of 0 x 5 pixels; both must be 1 at least")


def test_questions_are_bounded_and_a_huge_answer_becomes_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvrelay.worker.images, "_MAX_QUESTIONS", 1)
    desk, sent = Desk(), []

    def send(told: ImagesTold) -> None:
        if told.told is not None:
            raise MalformedMessageError("it is too large")
        sent.append(told)

    for query, width in ((1, 1), (2, 2), (3, 1)):
        desk.answer(AskImages(query=query, sizes=[(width, 1)]), send)
    assert sent == [ImagesTold(query=2)]  # ask elsewhere
    desk.played.run()
    problem = "too many images, or too large ones: it is too large"
    assert sent[1:] == [ImagesTold(query=query, problem=problem) for query in (1, 3)]


def test_questions_about_few_pixels_are_answered_first() -> None:
    """One client's large images must not let others wait for half a minute."""
    desk = Desk()
    told: list[ImagesTold] = []
    large, small = (9000, 5000), (128, 128)
    for query, sizes in enumerate([[large], [large] * 2, [large, (5000, 9000)], [small] * 64, [(1, 1)]]):
        desk.answer(AskImages(query=query, sizes=sizes), told.append)
    while desk.played.run(1):
        pass
    assert [one.query for one in told] == [0, 4, 3, 1, 2]
