"""A hand-off ends when its request's time is up, and an offer carries the remaining time."""

from __future__ import annotations

import msgspec

from kvrelay.wire.messages import FailureCode

from .service_rig import Rig, submit


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
