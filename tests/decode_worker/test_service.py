"""The decode worker's service: messages that come twice, late or with wrong values. The test plays the model thread."""

from __future__ import annotations

import logging

import pytest

from kvrelay.common.sampling import FinishReason, SampledToken, SamplingParams
from kvrelay.engine.fake.language import expected_output
from kvrelay.engine.kv.owners import Owner, OwnerKind, sequence_owner
from kvrelay.engine.step.sequence import Sequence
from kvrelay.wire.messages import (
    Cancel,
    Cancelled,
    Failed,
    FailureCode,
    Offer,
    Preempted,
    Refuse,
    Role,
)
from kvrelay.worker.model_worker import Add, Remove, Report
from tests.decode_worker.service_rig import BLOCK, CARD, Rig, offer, submit


def test_a_cancel_that_crosses_the_last_token_keeps_the_name_until_the_removal_is_answered() -> None:
    """A cancel and the last token cross. The name stays taken until the removal is answered: the answer could end a new request."""
    rig = Rig()
    rig.ask(submit("a", max_tokens=1))
    rig.handle()
    rig.model.step()
    rig.ask(Cancel(request_id="a", attempt=1))
    rig.hear()  # the last token; the removal is not handled yet
    rig.ask(submit("a"))
    assert [message.code for message in rig.told(Failed) if isinstance(message, Failed)] == [FailureCode.INVALID]
    rig.finish()
    assert rig.told(Cancelled) == [Cancelled(request_id="a", attempt=1)]
    assert rig.output("a") == []
    rig.ask(submit("a"))
    rig.finish()
    assert rig.output("a") == expected_output(list(range(6)), 3, CARD.vocab_size)
    rig.assert_nothing_left()


def test_a_preemption_is_told_and_the_sequence_goes_on_when_there_is_room() -> None:
    rig = Rig()
    thief = Owner(OwnerKind.LEASE, "thief")
    rig.ask(submit("a", max_tokens=9))
    rig.handle()
    rig.model.step()
    rig.blocks.allocate(thief, rig.blocks.num_allocatable)
    for _ in range(BLOCK):
        rig.model.step()
    rig.hear()
    assert rig.told(Preempted) == [Preempted(request_id="a", attempt=1)]
    rig.blocks.release(thief)
    rig.finish()
    assert rig.output("a") == expected_output(list(range(6)), 9, CARD.vocab_size)
    rig.assert_nothing_left()


def test_a_handed_over_sequence_that_cannot_be_taken_in_gives_its_blocks_back() -> None:
    rig = Rig()
    made = Sequence("a", 1, [1, 2], 2, SamplingParams(max_tokens=8), 0.0)
    allocation = rig.blocks.allocate(sequence_owner(made.key), 2)
    assert allocation is not None
    made.block_tables = allocation.block_tables
    rig.model.on_command_failed(Add(made), TypeError("late"))
    assert rig.reports == [Report(failed=(made.key,), detail="not taken in: TypeError")]
    assert rig.blocks.ledger().num_free == CARD.num_blocks


def test_books_that_do_not_agree_after_a_failure_end_the_loop() -> None:
    rig = Rig()
    rig.ask(submit("a"))
    rig.ask(submit("b"))
    rig.handle()
    rig.model.step()
    rig.blocks.release(sequence_owner(("b", 1)))
    with pytest.raises(AssertionError, match="owns"):
        rig.model.on_command_failed(Remove(("x", 1)), RuntimeError("boom"))


def test_tokens_that_reach_nobody_end_their_sequences() -> None:
    """Sending tokens to a lost gateway fails. Its sequence ends, because no peer would cancel it. The other one goes on."""
    rig = Rig()
    rig.ask(submit("a", max_tokens=100), "gone")
    rig.ask(submit("b", max_tokens=30))
    rig.deaf.add("gone")
    rig.handle()
    for _ in range(3):
        rig.model.step()
        rig.hear()
        rig.handle()
    assert [sequence.request_id for sequence in rig.scheduler.running] == ["b"]
    rig.finish()
    assert rig.output("b") == expected_output(list(range(6)), 30, CARD.vocab_size)
    assert rig.deltas("b")[-1].finish_reason is FinishReason.LENGTH
    rig.assert_nothing_left()


def test_a_prefill_worker_with_a_gateways_name_cannot_cancel() -> None:
    rig = Rig()
    rig.ask(submit("honest"), peer_id="gateway")
    rig.ask(Cancel(request_id="honest", attempt=1), peer_id="gateway", role=Role.PREFILL)
    assert not rig.sent
    assert len(rig.service.entries) == 1


@pytest.mark.parametrize(
    ("offered", "detail"),
    [
        (offer("a", [1] * CARD.max_model_len), "leave no room to generate"),
        (offer("a", [1, CARD.vocab_size]), "a token id lies outside"),
        (offer("a", [1, 2], num_prompt_tokens=3), "num_prompt_tokens is 3"),
        (offer("a", []), "num_prompt_tokens is 0"),
    ],
)
def test_an_offer_is_checked_like_a_submit(offered: Offer, detail: str) -> None:
    rig = Rig()
    rig.ask(offered, "prefill", Role.PREFILL)
    [(_, refused)] = rig.sent
    assert isinstance(refused, Refuse)
    assert refused.code is FailureCode.INVALID
    assert detail in refused.detail
    rig.assert_nothing_left()


@pytest.mark.parametrize("token_id", [-1, CARD.vocab_size])
def test_a_first_token_that_the_model_does_not_have_ends_the_lease(token_id: int) -> None:
    """The service rejects such a commit, because the token would break a step and every sequence in its batch."""
    rig = Rig()
    rejected = rig.reject(offer("a", [1, 2, 3]), SampledToken(token_id))
    assert rejected.code is FailureCode.INTEGRITY  # another attempt may succeed
    assert f"the first token is {token_id}; it must be 0 to {CARD.vocab_size - 1}" in rejected.detail
    rig.assert_nothing_left()


def test_what_is_sent_twice_is_answered_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    for _ in range(2):
        rig.ask(submit("a"))
        rig.ask(offer("b", [1, 2, 3]), "prefill", Role.PREFILL)
    kinds = [type(message).__name__ for _, message in rig.sent]
    assert kinds == ["Grant", "Failed", "Refuse"]
    rig.ask(Cancel(request_id="b", attempt=1))
    rig.ask(Cancel(request_id="b", attempt=1))
    rig.finish()
    assert rig.output("a") == expected_output(list(range(6)), 3, CARD.vocab_size)
    rig.assert_nothing_left()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_gateways_hear_whose_blocks_are_on_their_way() -> None:
    rig = Rig()
    rig.ask(submit("a"))
    rig.ask(offer("b", [1, 2, 3]), "prefill", Role.PREFILL)
    assert (rig.service.status().num_waiting, rig.service.status().num_arriving) == (2, 1)
    rig.ask(Cancel(request_id="b", attempt=1))
    assert (rig.service.status().num_waiting, rig.service.status().num_arriving) == (1, 0)
    rig.finish()
    rig.assert_nothing_left()


def test_gateways_hear_how_much_of_prompts_is_left_and_what_they_get() -> None:
    rig = Rig()
    assert (rig.service.status().num_waiting_tokens, rig.service.status().prompt_tokens_per_s) == (0, None)
    rig.ask(submit("a", 100))
    rig.ask(submit("b", 40))
    assert rig.service.status().num_waiting_tokens == 140
    rig.handle()
    rig.finish()
    assert rig.service.status().num_waiting_tokens == 0
    rig.scheduler.prompt_tokens_per_s = 0.0
    assert rig.service.status().prompt_tokens_per_s == 0.0


def test_a_prompt_in_progress_counts_by_what_is_left_of_it() -> None:
    rig = Rig(max_batched_tokens=64)
    rig.ask(submit("a", 100))
    rig.handle()
    rig.model.step()
    assert rig.service.status().num_waiting_tokens == 36
    rig.finish()
    assert rig.service.status().num_waiting_tokens == 0
