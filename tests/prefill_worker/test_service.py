"""The prefill worker's service: cancels, lost links and failed steps during hand-offs, which the test plays."""

from __future__ import annotations

from typing import cast

import pytest

from kvrelay.engine.fake.language import expected_output
from kvrelay.wire.messages import Cancel, Cancelled, FailureCode, HandedOver, Tokens
from kvrelay.wire.transfers.transfer import DecodeLink
from kvrelay.worker.model_worker import Report
from tests.prefill_worker.service_rig import CARD, DECODE, PROMPT, Rig, submit


def test_a_cancel_that_crosses_the_token_keeps_the_name_until_the_removal_is_answered() -> None:
    """A cancel and the first token cross. The name stays taken until the removal is answered, which could hit a new request."""
    rig = Rig()
    rig.ask(submit("a"))
    rig.handle()
    rig.model.step()
    rig.ask(Cancel(request_id="a", attempt=1))
    rig.hear()  # the token; the removal is not handled yet
    rig.release_sends()
    rig.ask(submit("a"))
    assert rig.failures() == [("a", FailureCode.INVALID)]
    rig.finish()
    assert rig.told(Cancelled) == [Cancelled(request_id="a", attempt=1)]
    rig.ask(submit("a"))
    rig.finish()
    [tokens] = rig.told(Tokens)
    assert isinstance(tokens, Tokens)
    assert [token.token_id for token in tokens.items[0].tokens] == expected_output(PROMPT, 1, CARD.vocab_size)
    rig.service.on_verified(("a", 1))
    rig.release_sends()
    assert rig.told(HandedOver) == [HandedOver(request_id="a", attempt=1)]
    rig.assert_nothing_left()


def test_a_prompt_that_cannot_even_be_scheduled_is_ended_alone() -> None:
    rig = Rig()
    rig.ask(submit("a"))
    rig.ask(submit("b", max_tokens=1))
    rig.handle()
    rig.scheduler.waiting[0].chain = None
    with pytest.raises(AssertionError) as raised:
        rig.model.step()
    rig.model.on_step_failed(raised.value)
    rig.finish()
    assert rig.failures() == [("a", FailureCode.INTERNAL)]
    assert len(rig.told(Tokens)) == 1
    rig.assert_nothing_left()


def test_one_link_that_breaks_in_the_middle_of_a_report_costs_no_other_its_token(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig()
    rig.transfers.broken.add(("a", 1))
    rig.ask(submit("a"))
    rig.ask(submit("b", max_tokens=1))
    rig.finish()
    assert rig.failures() == []  # "a" has not failed yet: its sends may still read the blocks
    assert [item.request_id for told in rig.told(Tokens) for item in told.items] == ["b"]
    assert not caplog.records, "it was an error, and not the end of a link"
    rig.release_sends()
    assert rig.failures() == [("a", FailureCode.PEER_LOST)]
    rig.assert_nothing_left()


def test_a_decode_worker_that_takes_no_blocks_is_fenced_off() -> None:
    """A request is cancelled, but sends on a healthy link still read its blocks after five seconds. The link is reset once."""
    rig = Rig()
    rig.ask(submit("a"))
    rig.finish()
    rig.ask(Cancel(request_id="a", attempt=1))
    rig.service.tick()
    rig.now_s += 4.0
    rig.service.tick()
    assert rig.links.resets == []
    rig.now_s += 2.0
    rig.service.tick()
    rig.service.tick()  # the sends end a little later: the new link must not be reset, too
    assert rig.links.resets == [DECODE]
    rig.release_sends()
    rig.assert_nothing_left()


def test_a_cancel_on_a_slow_network_ends_no_other_hand_off() -> None:
    """ZeroMQ may need long for the blocks that it has. As long as blocks leave, the link works, and others use it."""
    rig = Rig()
    rig.ask(submit("a"))
    rig.finish()
    rig.ask(Cancel(request_id="a", attempt=1))
    for _ in range(5):
        rig.now_s += 4.0
        rig.service.tick()
        rig.transfers.block_left_s = rig.now_s
    assert rig.links.resets == []
    rig.now_s += 6.0
    rig.service.tick()
    assert rig.links.resets == [DECODE]
    rig.release_sends()
    rig.assert_nothing_left()


def test_what_waits_for_a_link_is_forgotten_with_its_request() -> None:
    rig = Rig()
    rig.links.down.add(DECODE)
    for name in ("a", "b"):
        rig.ask(submit(name))
    rig.finish()
    rig.ask(Cancel(request_id="a", attempt=1))
    rig.service.tick()
    assert [entry.sequence.request_id for entry in rig.service._linkless(DECODE)] == ["b"]
    rig.now_s += 11.0
    rig.service.tick()
    assert rig.failures() == [("b", FailureCode.PEER_LOST)]
    rig.assert_nothing_left()


def test_a_link_that_comes_up_late_gets_offer_and_commit() -> None:
    rig = Rig()
    rig.links.down.add(DECODE)
    rig.ask(submit("a"))
    rig.finish()
    assert rig.transfers.open_keys == []
    rig.service.on_link_up(DECODE, cast("DecodeLink", object()))
    assert rig.transfers.open_keys == rig.transfers.committed == [("a", 1)]
    rig.service.on_verified(("a", 1))
    rig.release_sends()
    rig.assert_nothing_left()


def test_a_failed_step_does_not_answer_for_a_removal() -> None:
    rig = Rig()
    rig.ask(submit("a"))
    rig.handle()
    rig.service.on_report(Report(started=(("a", 1),)))  # its step begins …
    rig.model.on_step_failed(RuntimeError("boom"))  # … and fails
    rig.ask(Cancel(request_id="a", attempt=1))
    rig.hear()
    rig.release_sends()
    rig.ask(submit("a"))
    assert rig.failures() == [("a", FailureCode.INVALID)], "its name is free before the removal is answered"
    rig.finish()
    assert rig.told(Cancelled) == [Cancelled(request_id="a", attempt=1)]
    rig.assert_nothing_left()
