"""The decode worker ends a request, a sequence or a lease when the request's time is up."""

from __future__ import annotations

import math

import msgspec
import pytest

from kvrelay.engine.fake.language import expected_output
from kvrelay.wire.messages import Failed, FailureCode, Grant, Message, Refuse, Reject, Role

from .service_rig import CARD, Rig, offer, submit


def codes(messages: list[Message]) -> list[FailureCode]:
    return [message.code for message in messages if isinstance(message, Failed | Refuse | Reject)]


@pytest.mark.parametrize("timeout_s", [0.0, -3.0, math.nan])
def test_an_offer_that_comes_too_late_is_refused(timeout_s: float) -> None:
    rig = Rig()
    rig.ask(msgspec.structs.replace(offer("b", [1, 2, 3]), timeout_s=timeout_s), "prefill", Role.PREFILL)
    assert codes(rig.told(Refuse)) == [FailureCode.DEADLINE]
    rig.assert_nothing_left()


def test_a_sequence_whose_time_is_up_leaves_the_batch() -> None:
    rig = Rig()
    rig.ask(msgspec.structs.replace(submit("late", max_tokens=30), timeout_s=5.0))
    rig.ask(submit("patient", max_tokens=5))
    rig.handle()
    for _ in range(2):
        rig.model.step()
        rig.hear()
    rig.now_s += 5.0
    rig.service.tick()
    rig.finish()
    assert codes(rig.told(Failed)) == [FailureCode.DEADLINE]
    assert len(rig.output("late")) == 2
    assert rig.output("patient") == expected_output(list(range(6)), 5, CARD.vocab_size)
    rig.assert_nothing_left()


def test_a_lease_whose_requests_time_is_up_ends_and_both_sides_hear_why() -> None:
    rig = Rig()
    rig.ask(msgspec.structs.replace(offer("a", [1, 2, 3]), timeout_s=5.0), "prefill", Role.PREFILL)
    assert len(rig.told(Grant)) == 1
    rig.now_s += 5.0
    rig.service.tick()
    assert codes(rig.told(Reject)) == [FailureCode.DEADLINE]
    assert codes(rig.told(Failed)) == [FailureCode.DEADLINE]
    rig.assert_nothing_left()
