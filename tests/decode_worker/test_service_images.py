"""Prompts with images on a decode worker: checked at the hand-off, or read here, and never computed where nobody reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq

import msgspec
import pytest

from kvrelay.common.images import ImageSpan
from kvrelay.common.sampling import SampledToken
from kvrelay.engine.fake.images import fake_offset
from kvrelay.engine.fake.language import expected_output
from kvrelay.wire.messages import Failed, FailureCode, Preempted, Refuse, Role
from kvrelay.worker.model_worker import Report
from tests.decode_worker.service_rig import CARD, offer, submit
from tests.decode_worker.service_rig import Rig as ServiceRig
from tests.decode_worker.test_images import prompt_with
from tests.images import png, reader, with_images


def test_a_request_with_images_is_not_prefilled_here() -> None:
    rig, (token_ids, images) = ServiceRig(), with_images([1, 2], png(128, 128))
    asked = msgspec.structs.replace(submit("a"), token_ids=token_ids, num_prompt_tokens=len(token_ids), images=images)
    rig.ask(asked)
    [failed] = rig.failed()
    assert failed.code is FailureCode.INVALID
    assert failed.detail == f"the prompt has images: {CARD.no_images}"
    rig.assert_nothing_left()


def test_a_worker_that_decodes_and_reads_images_computes_them() -> None:
    token_ids, images = with_images([1, 2], png(128, 128), [5])
    asked = msgspec.structs.replace(submit("a"), token_ids=token_ids, num_prompt_tokens=len(token_ids), images=images)
    rig = ServiceRig(reader())
    rig.ask(asked)
    rig.threads.run()
    rig.finish()
    assert rig.output("a") == expected_output(token_ids, 3, CARD.vocab_size, images=[one.span for one in images])
    assert rig.service.ports.images._read_nbytes == 0
    rig.assert_nothing_left()


def test_an_image_that_no_step_has_room_for_is_refused() -> None:
    token_ids, images = with_images([1, 2], png(128, 128), [5])
    asked = msgspec.structs.replace(submit("a"), token_ids=token_ids, num_prompt_tokens=len(token_ids), images=images)
    for max_step_tokens, is_refused in ((68, True), (69, False), (None, False)):
        rig = ServiceRig(reader(takes_whole=True))
        rig.service.identity = dataclasses.replace(rig.service.identity, max_step_tokens=max_step_tokens)
        rig.ask(asked)
        assert [failed.code for failed in rig.failed()] == [FailureCode.INVALID] * is_refused
        assert all(
            "5 tokens of the prompt's images must be computed together; the limit is 4" in one.detail
            for one in rig.failed()
        )


@pytest.mark.parametrize("takes_whole", [False, True])
def test_a_sequence_that_lost_its_blocks_computes_its_images_again(takes_whole: bool) -> None:
    rig = ServiceRig(reader(takes_whole=takes_whole))
    token_ids, images = with_images([1, 2], png(128, 128), [5])
    asked = msgspec.structs.replace(submit("a", max_tokens=9), token_ids=token_ids, num_prompt_tokens=len(token_ids))
    rig.ask(msgspec.structs.replace(asked, images=images))
    rig.threads.run()
    rig.handle()
    while len(rig.output("a")) < 4:
        rig.model.step()
        rig.hear()
    [sequence] = rig.scheduler.running
    rig.scheduler._held.preempt(sequence, rig.scheduler.schedule(0.0))
    rig.blocks.distrust("nobody")
    assert rig.scheduler.take_lost() == ()
    rig.finish()
    spans = [image.span for image in images]
    assert rig.output("a") == expected_output(token_ids, 9, CARD.vocab_size, images=spans)
    assert (sequence.num_preemptions, rig.service.ports.images._read_nbytes) == (1, 0)
    rig.assert_nothing_left()


@pytest.mark.parametrize("phase", ["read", "queued", "running"])
def test_a_request_with_images_that_ends_early_frees_them(phase: str) -> None:
    rig = ServiceRig(reader())
    token_ids, images = with_images([1, 2], png(128, 128), [5])
    asked = msgspec.structs.replace(submit("a", max_tokens=9), token_ids=token_ids, num_prompt_tokens=len(token_ids))
    rig.ask(msgspec.structs.replace(asked, images=images))
    if phase != "read":
        rig.threads.run()
        rig.handle()
    if phase == "running":
        rig.model.step()
        rig.hear()
    rig.end("cancel")
    rig.threads.run()
    rig.finish()
    assert rig.cancelled() == ["a"]
    desk = rig.service.ports.images
    assert (desk._read_nbytes, desk._files_nbytes) == (0, 0)
    rig.assert_nothing_left()


def test_hashes_of_an_offer_are_those_of_its_images() -> None:
    rig, (token_ids, spans) = ServiceRig(), prompt_with(1)
    made = offer("a", token_ids, images=spans)
    for images in ([], [ImageSpan(spans[0].start, spans[0].stop, bytes(16))], prompt_with(1, 2)[1]):
        rig.ask(msgspec.structs.replace(made, images=images), "prefill", Role.PREFILL)
    refused = [message for _, message in rig.sent if isinstance(message, Refuse)]
    assert [one.code for one in refused] == [FailureCode.INTEGRITY, FailureCode.INTEGRITY, FailureCode.INVALID]
    rig.grant(made)


def test_the_offset_of_a_commit_is_the_sequences() -> None:
    rig, (token_ids, spans) = ServiceRig(), prompt_with(1, 2)
    made = offer("a", token_ids, images=spans)
    rig.verify(rig.grant(made), made, 5, position_offset=fake_offset(spans))
    [entry] = rig.service.entries.values()
    assert entry.sequence.position_offset == fake_offset(spans) != 0
    assert entry.sequence.spans == spans


@pytest.mark.parametrize(("shades", "position_offset"), [((), 1), ((1,), -11), ((1,), 4097)])
def test_an_impossible_offset_is_rejected(shades: Seq[int], position_offset: int) -> None:
    rig, (token_ids, spans) = ServiceRig(), prompt_with(*shades)
    rejected = rig.reject(offer("a", token_ids, images=spans), SampledToken(5), position_offset)
    assert rejected.code is FailureCode.INTEGRITY
    assert f"position_offset is {position_offset}" in rejected.detail


def test_a_request_that_lost_its_blocks_ends_so_that_its_gateway_goes_on_elsewhere() -> None:
    rig, (token_ids, spans) = ServiceRig(), prompt_with(1)
    made = offer("a", token_ids, images=spans)
    rig.verify(rig.grant(made), made, 5, position_offset=fake_offset(spans))
    rig.handle()
    [sequence] = rig.scheduler.waiting
    rig.scheduler._held.preempt(sequence, rig.scheduler.schedule(0.0))
    rig.service.on_report(Report(lost=rig.scheduler.take_lost()))
    [failed] = rig.told(Failed)
    assert isinstance(failed, Failed)
    assert (failed.code, rig.told(Preempted)) == (FailureCode.NO_ROOM, [])
    rig.assert_nothing_left()
