"""Nobody computes what nobody waits for: a request's time travels with it to the prefill worker."""

from __future__ import annotations

import math

import msgspec
import pytest

from kvrelay.wire.messages import FailureCode, Tokens

from .test_service import Rig, submit


@pytest.mark.parametrize("timeout_s", [0.0, -3.0, math.nan])
def test_a_request_that_comes_too_late_is_not_taken(timeout_s: float) -> None:
    rig = Rig()
    rig.ask(msgspec.structs.replace(submit("a"), timeout_s=timeout_s))
    assert rig.failures() == [("a", FailureCode.DEADLINE)]
    assert not rig.commands
    rig.assert_nothing_left()


def test_a_prompt_whose_time_is_up_is_not_computed() -> None:
    rig = Rig()
    rig.ask(msgspec.structs.replace(submit("late"), timeout_s=5.0))
    rig.ask(submit("patient"))
    rig.now_s += 4.9
    rig.service.tick()
    assert rig.failures() == []
    rig.now_s += 0.1
    rig.service.tick()
    rig.finish()
    assert rig.failures() == [("late", FailureCode.DEADLINE)]
    assert [one.items[0].request_id for one in rig.told(Tokens) if isinstance(one, Tokens)] == ["patient"]
    rig.service.on_verified(("patient", 1))
    rig.release_sends()
    rig.assert_nothing_left()


def test_a_hand_off_whose_time_is_up_is_given_up() -> None:
    rig = Rig()
    rig.ask(msgspec.structs.replace(submit("a"), timeout_s=5.0))
    rig.finish()
    rig.now_s += 6.0
    rig.service.tick()
    assert rig.transfers.aborted == [("a", 1)]
    rig.release_sends()
    assert rig.failures() == [("a", FailureCode.DEADLINE)]
    rig.assert_nothing_left()


def test_the_offer_says_what_is_left() -> None:
    rig = Rig()
    offers = []
    rig.transfers.open = lambda key, link, offer, blocks: offers.append(offer)  # type: ignore[method-assign]
    rig.ask(msgspec.structs.replace(submit("a"), timeout_s=5.0))
    rig.ask(submit("b"))
    rig.now_s += 2.0
    rig.finish()
    assert [(one.request_id, one.timeout_s) for one in offers] == [("a", 3.0), ("b", None)]
