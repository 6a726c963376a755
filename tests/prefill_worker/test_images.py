"""Prompts with images on a prefill worker: they are read before they are queued, and handed over with spans and offset."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
import pytest

from kvrelay.common.adapter_files import AdapterRef
from kvrelay.common.block_hash import HashChain
from kvrelay.common.images import ImageSpan
from kvrelay.engine.fake.images import fake_offset
from kvrelay.engine.fake.language import expected_output
from kvrelay.engine.fake.step import Share
from kvrelay.engine.images.interface import ImageError
from kvrelay.wire.messages import ABOUT_IMAGES, AskImages, Cancel, FailureCode, ImagesTold, Submit
from kvrelay.worker.entries import Phase
from tests.images import png, reader, with_images
from tests.prefill_worker.service_rig import CARD, Rig, submit

SHOWN = png(128, 128, 9)


def imaged(name: str, *shown: bytes, output: tuple[int, ...] = (), max_tokens: int = 3) -> Submit:
    """A request with text around each image."""
    token_ids, images = with_images([11, 12, 13], *(part for data in shown for part in (data, [14, 15])))
    made = msgspec.structs.replace(submit(name, max_tokens), images=images, num_prompt_tokens=len(token_ids))
    return msgspec.structs.replace(made, token_ids=[*token_ids, *output])


def expected(asked: Submit) -> list[int]:
    """The first token."""
    return expected_output(asked.token_ids, 1, CARD.vocab_size, images=[image.span for image in asked.images])


def assert_no_image_held(rig: Rig) -> None:
    desk = rig.service.ports.images
    assert (desk._files_nbytes, desk._read_nbytes) == (0, 0)


def test_a_prompt_waits_for_its_images_and_is_handed_over_with_them() -> None:
    rig, asked = Rig(reader()), imaged("a", SHOWN, png(128, 128, 1))
    spans = [image.span for image in asked.images]
    rig.ask(asked)
    assert rig.commands == []
    [entry] = rig.service.entries.values()
    assert entry.phase is Phase.COMPILING
    assert entry.submit.images == []  # the files are held once
    rig.threads.run()
    rig.finish()
    assert rig.output("a") == expected(asked)
    assert rig.output("a") != expected_output(asked.token_ids, 1, CARD.vocab_size)
    [offer] = rig.transfers.offers
    assert offer.images == spans
    chain = HashChain(CARD.layout.fingerprint(), CARD.layout.block_size, images=spans)
    assert offer.block_hashes == chain.hashes_of_all(asked.token_ids)
    assert rig.transfers.position_offsets == {("a", 1): fake_offset(spans)}
    assert (entry.reading, entry.sequence.images) == (None, None)  # freed before the hand-off is over
    rig.settle()
    rig.assert_nothing_left()


def test_the_same_prompt_again_is_cached_but_not_with_another_image_of_its_size() -> None:
    rig = Rig(reader())
    other = png(128, 128, 77)
    for name, data in (("a", SHOWN), ("b", SHOWN), ("c", other)):
        rig.ask(imaged(name, data))
        rig.threads.run()
        rig.settle()
    cached = [rig.deltas(name)[0].num_cached_tokens for name in "abc"]
    assert cached == [0, 8, 0]  # 10 tokens, and the image begins in the first block of 4
    assert rig.output("a") == rig.output("b") != rig.output("c") == expected(imaged("c", other))
    rig.assert_nothing_left()


def test_a_later_attempt_goes_on_after_the_output_so_far() -> None:
    rig, asked = Rig(reader()), imaged("a", SHOWN, output=(21, 22), max_tokens=5)
    rig.ask(asked)
    rig.threads.run()
    rig.finish()
    assert rig.output("a") == expected(asked)
    assert rig.deltas("a")[0].index == 2
    rig.settle()
    rig.assert_nothing_left()


@pytest.mark.parametrize(
    ("data", "detail"),
    [
        (b"GIF89", "image 0 is no PNG"),
        (SHOWN[:-1], "image 0 is cut off"),
        (png(64, 64), "has 4 placeholders; it needs 1"),
    ],
)
def test_an_image_that_cannot_be_read_fails_its_request_alone(data: bytes, detail: str) -> None:
    rig = Rig(reader())
    rig.ask(imaged("a", data))
    rig.ask(imaged("b", SHOWN))
    rig.threads.run()
    rig.settle()
    [failed] = rig.failed()
    assert (failed.request_id, failed.code, failed.about) == ("a", FailureCode.INVALID, ABOUT_IMAGES)
    assert detail in failed.detail
    assert rig.output("b") == expected(imaged("b", SHOWN))
    rig.assert_nothing_left()


@pytest.mark.parametrize("is_read", [False, True])
def test_a_cancel_frees_images(is_read: bool) -> None:
    rig = Rig(reader())
    rig.ask(imaged("a", SHOWN))
    rig.ask(imaged("b", SHOWN))
    if is_read:
        rig.threads.run()
    for name in "ab":
        rig.ask(Cancel(request_id=name, attempt=1))
    rig.threads.run()
    rig.settle()
    assert rig.cancelled() == ["a", "b"]
    assert_no_image_held(rig)
    rig.assert_nothing_left()


def test_images_of_a_request_that_is_refused_its_adapter_are_not_held() -> None:
    rig, adapter = Rig(reader()), AdapterRef("absent", "0" * 64)
    rig.ask(msgspec.structs.replace(imaged("a", SHOWN), adapter=adapter))
    assert rig.failures() == [("a", FailureCode.NO_ADAPTER)]
    rig.threads.run()
    assert_no_image_held(rig)
    rig.assert_nothing_left()


def test_a_failed_step_computes_images_again() -> None:
    rig = Rig(reader())
    for name in "ab":
        rig.ask(imaged(name, SHOWN))
    rig.threads.run()
    rig.handle()

    def fail(shares: object) -> None:
        rig.engine._on_step = lambda shares: None
        raise RuntimeError("this step fails")

    rig.engine._on_step = fail
    with pytest.raises(RuntimeError) as raised:
        rig.model.step()
    rig.model.on_step_failed(raised.value)
    rig.settle()
    assert rig.output("a") == rig.output("b") == expected(imaged("a", SHOWN))
    rig.assert_nothing_left()


def test_an_image_that_breaks_the_encoder_fails_its_request_alone_for_good() -> None:
    """As a failure of the worker it would be tried again, and break steps of other workers."""
    rig = Rig(reader())
    for name, data in (("a", SHOWN), ("bad", SHOWN), ("b", SHOWN)):
        rig.ask(imaged(name, data))
    rig.threads.run()
    rig.handle()

    def fail(shares: Sequence[Share]) -> None:
        if any(share.sequence.name.startswith("bad") for share in shares):
            raise ImageError("image 0 cannot be encoded")

    rig.engine._on_step = fail
    for _ in range(8):
        if not rig.failed():
            try:
                rig.model.step()
            except ImageError as error:
                rig.model.on_step_failed(error)
            rig.hear()
            rig.handle()
    rig.settle()
    [failed] = rig.failed()
    assert (failed.request_id, failed.code, failed.about) == ("bad", FailureCode.INVALID, ABOUT_IMAGES)
    assert failed.detail == "image 0 cannot be encoded"
    assert rig.output("a") == rig.output("b") == expected(imaged("a", SHOWN))
    rig.assert_nothing_left()


@pytest.mark.parametrize(
    ("spans", "detail"),
    [
        ([ImageSpan(3, 9, bytes(16)), ImageSpan(8, 9, bytes(16))], "image 1 has tokens 8 to 9"),
        ([ImageSpan(3, 99, bytes(16))], "image 0 has tokens 3 to 99"),
        ([ImageSpan(3, 8, b"short")], "image 0 has a digest of 5 bytes"),
        ([ImageSpan(-1, 8, bytes(16))], "image 0 has tokens -1 to 8"),
    ],
)
def test_impossible_spans_are_refused(spans: list[ImageSpan], detail: str) -> None:
    rig, asked = Rig(reader()), imaged("a", SHOWN)
    images = [msgspec.structs.replace(asked.images[0], span=span) for span in spans]
    rig.ask(msgspec.structs.replace(asked, images=images))
    [failed] = rig.failed()
    assert failed.code is FailureCode.INVALID
    assert detail in failed.detail
    rig.assert_nothing_left()


def test_a_text_only_worker_refuses_images_and_says_why() -> None:
    rig = Rig()
    rig.ask(imaged("a", SHOWN))
    rig.ask(AskImages(query=3, sizes=[(1, 1)]))
    [failed] = rig.failed()
    assert failed.code is FailureCode.INVALID
    assert CARD.no_images in failed.detail
    assert rig.told(ImagesTold) == [ImagesTold(query=3, problem=CARD.no_images)]


def test_an_image_that_no_step_can_take_whole_is_refused() -> None:
    rig = Rig(reader(takes_whole=True))
    rig.service.identity = dataclasses.replace(rig.service.identity, max_step_tokens=4)
    rig.ask(imaged("a", SHOWN))
    [failed] = rig.failed()
    assert failed.code is FailureCode.INVALID
    assert failed.detail.startswith("5 tokens of the prompt's images must be computed together; the limit is")
    rig.service.identity = dataclasses.replace(rig.service.identity, max_step_tokens=5)
    rig.ask(imaged("b", SHOWN))
    rig.threads.run()
    rig.settle()
    assert rig.output("b") == expected(imaged("b", SHOWN))
