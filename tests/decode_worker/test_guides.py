"""Sequences with a guide: local and handed over, waiting for the guide, preempted, and ended while they wait."""

from __future__ import annotations

import msgspec
import pytest

from kvrelay.common.sampling import Guide, GuideKind
from kvrelay.decode_worker.scheduler import DecodeScheduler
from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.wire.messages import (
    Cancel,
    Cancelled,
    Failed,
    FailureCode,
    Offer,
    Reject,
    Submit,
)

from ..guides import tokens_guide
from .service_rig import Rig, offer, submit

PROMPT = list(range(6))


def guided(name: str, *token_ids: int, output: tuple[int, ...] = ()) -> Submit:
    plain = submit(name, max_tokens=8)
    sampling = msgspec.structs.replace(plain.sampling, guide=tokens_guide(*token_ids))
    return msgspec.structs.replace(plain, sampling=sampling, token_ids=[*PROMPT, *output])


def guided_offer(name: str, *token_ids: int, output: tuple[int, ...] = ()) -> Offer:
    plain = offer(name, [*PROMPT, *output], len(PROMPT))
    return msgspec.structs.replace(
        plain, sampling=msgspec.structs.replace(plain.sampling, guide=tokens_guide(*token_ids))
    )


def test_guided_and_free_rows_share_a_batch() -> None:
    rig = Rig()
    rig.ask(guided("a", 77, 5, 9))
    rig.ask(submit("b"))
    rig.ask(guided("c", 4, 4))
    rig.guides.answer()
    rig.finish()
    assert (rig.output("a"), len(rig.output("b")), rig.output("c")) == ([77, 5, 9], 3, [4, 4])
    rig.assert_nothing_left()


@pytest.mark.parametrize("is_early", [True, False])
def test_a_sequence_that_is_handed_over_joins_when_its_guide_is_there(is_early: bool) -> None:
    rig = Rig()
    made = guided_offer("a", 77, 5, 9, output=(77,))
    granted = rig.grant(made)
    if is_early:
        rig.guides.answer()
    rig.verify(granted, made, 5)
    if not is_early:
        assert not rig.commands
        assert rig.service.status().num_waiting == 1
        rig.guides.answer()
    [command] = rig.commands
    [sequence] = [command.sequence]  # type: ignore[union-attr]
    assert sequence.guide is not None
    assert sequence.guide.left == [9]  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", ["cancel", "deadline", "gateway lost", "refused"])
def test_a_verified_sequence_without_its_guide_gives_its_blocks_back(how: str) -> None:
    rig = Rig()
    made = msgspec.structs.replace(guided_offer("a", 77, 5), timeout_s=5.0)
    if how == "refused":
        guide = Guide(kind=GuideKind.REGEX, text="bad")
        made = msgspec.structs.replace(made, sampling=msgspec.structs.replace(made.sampling, guide=guide))
    rig.verify(rig.grant(made), made, 77)
    if how == "refused":
        rig.guides.answer()
    else:
        rig.end(how)
    rig.guides.answer()
    assert len(rig.told(Cancelled) + rig.told(Failed)) == 1
    rig.assert_nothing_left()


def test_a_guide_that_is_refused_ends_the_lease() -> None:
    rig = Rig()
    made = guided_offer("a", 1)
    guide = Guide(kind=GuideKind.REGEX, text="bad")
    rig.grant(msgspec.structs.replace(made, sampling=msgspec.structs.replace(made.sampling, guide=guide)))
    rig.guides.answer()
    [reject] = rig.told(Reject)
    assert isinstance(reject, Reject)
    assert reject.code is FailureCode.INVALID
    assert [one.code for one in rig.failed()] == [FailureCode.INVALID]
    rig.assert_nothing_left()


def test_a_first_token_that_the_guide_does_not_allow_fails_the_attempt() -> None:
    rig = Rig()
    made = guided_offer("a", 77, 5)
    rig.verify(rig.grant(made), made, 78)
    rig.guides.answer()
    assert [(one.code, one.detail) for one in rig.failed()] == [
        (FailureCode.INVALID, "the first token: 78 came instead of 77")
    ]
    rig.assert_nothing_left()


def test_a_preempted_sequence_goes_on_in_its_guide() -> None:
    rig = Rig()
    rig.blocks = BlockManager(6, 4, lambda: 0.0)
    rig.scheduler = DecodeScheduler(DecodeSchedulerSettings(), rig.blocks, 1000, "cpu")
    rig.model._scheduler, rig.service.blocks = rig.scheduler, rig.blocks
    outputs = {"a": list(range(10, 18)), "b": list(range(20, 28))}
    for name, output in outputs.items():
        rig.now_s += 1.0
        rig.ask(guided(name, *output))
    rig.guides.answer()
    rig.finish()
    assert {name: rig.output(name) for name in outputs} == outputs
    assert rig.model._metrics.preemptions._value.get() >= 1
    rig.assert_nothing_left()


def test_a_cancel_that_the_last_block_outruns_gives_the_blocks_back(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    made = offer("a", PROMPT)
    granted = rig.grant(made)
    monkeypatch.setattr(rig.service._leases, "cancel", lambda *asked: None)  # the lease is verified already
    rig.ask(Cancel(request_id="a", attempt=1))
    assert rig.cancelled() == []
    rig.verify(granted, made, 5)
    assert rig.cancelled() == ["a"]
    assert not rig.commands
    rig.assert_nothing_left()
