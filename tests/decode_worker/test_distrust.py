"""A gateway reports that a prefill worker computed wrongly. The decode worker drops that worker's blocks and ends its users."""

from __future__ import annotations

import msgspec
import pytest

from kvrelay.engine.fake.language import expected_output
from kvrelay.engine.kv.leased_blocks import lease_owner
from kvrelay.engine.kv.owners import sequence_owner
from kvrelay.wire.messages import Abort, Distrust, FailureCode, Grant, Refuse, Role
from tests.decode_worker.rig import beams
from tests.decode_worker.service_rig import BLOCK, CARD, EPOCH, Rig, offer, submit

WRONG = "prefill-1"
NUM_TOKENS = 6
TOKENS = list(range(NUM_TOKENS))  # the prompt of ``submit``


def shipped(rig: Rig, peer_id: str = WRONG) -> int:
    """Blocks of ``TOKENS`` arrive from prefill worker ``peer_id``. Returns the lease's id."""
    offered = offer("shipped", TOKENS)
    rig.ask(offered, peer_id, Role.PREFILL)
    [grant] = rig.told(Grant)
    assert isinstance(grant, Grant)
    owner = lease_owner(str(grant.lease_id))
    # The blocks hold no K/V of these tokens: a step that read them would fail.
    for index, block_hash in enumerate(offered.block_hashes[: NUM_TOKENS // BLOCK]):
        rig.blocks.publish(owner, index, block_hash)
    return grant.lease_id


def left_in_cache(rig: Rig, lease_id: int) -> None:
    """The prefill worker aborts the hand-off, and its full blocks stay in the cache."""
    rig.ask(Abort(lease_id=lease_id, epoch=EPOCH, reason="the prompt was taken back"), WRONG, Role.PREFILL)
    rig.finish()
    assert rig.blocks.ledger().num_cached == NUM_TOKENS // BLOCK


def test_its_cached_blocks_are_dropped_and_its_offers_refused() -> None:
    rig = Rig()
    left_in_cache(rig, shipped(rig))
    rig.ask(Distrust(peer_id=WRONG))
    assert rig.blocks.ledger().num_free == CARD.num_blocks
    rig.ask(offer("more", TOKENS), WRONG, Role.PREFILL)
    _, refused = rig.sent[-1]
    assert isinstance(refused, Refuse)
    assert (refused.code, refused.detail) == (FailureCode.INTEGRITY, f"prefill worker {WRONG} computes wrongly")
    rig.assert_nothing_left()


def test_its_lease_ends() -> None:
    rig = Rig()
    shipped(rig)
    rig.ask(Distrust(peer_id=WRONG))
    rig.finish()
    assert rig.blocks.ledger().num_free == CARD.num_blocks
    rig.assert_nothing_left()


def test_requests_that_use_its_blocks_end_so_that_the_gateway_asks_again_and_others_go_on() -> None:
    rig = Rig()
    left_in_cache(rig, shipped(rig))
    rig.ask(submit("uses"))
    rig.ask(submit("other", num_tokens=BLOCK - 1, max_tokens=9))
    rig.handle()
    rig.model._schedule()  # the sequence has its blocks, and nothing is computed yet
    assert rig.blocks.ledger().num_cached == 0, "it does not use them"
    rig.ask(Distrust(peer_id=WRONG))
    rig.finish()
    assert rig.cancelled() == ["uses"]
    assert rig.output("uses") == []
    assert rig.output("other") == expected_output(TOKENS[: BLOCK - 1], 9, CARD.vocab_size)
    rig.ask(submit("uses"))
    rig.finish()
    assert rig.output("uses") == expected_output(TOKENS, 3, CARD.vocab_size)
    rig.assert_nothing_left()


def test_a_beam_search_that_uses_its_blocks_ends_whatever_beams_it_has_by_then() -> None:
    rig = Rig()
    rig.ask(msgspec.structs.replace(submit("uses"), sampling=beams(2, max_tokens=60, stops=())))
    rig.handle()
    rig.model._schedule()  # the sequence has its blocks, and nothing is computed yet
    rig.blocks.came_from(sequence_owner(("uses", 1)), WRONG)  # as if it had found some of them cached
    while min(beam.beam for beam in rig.scheduler.running) < 2:  # forks have new numbers
        rig.model.step()
    rig.ask(Distrust(peer_id=WRONG))
    rig.finish()
    assert rig.cancelled() == ["uses"]
    assert not any(delta.beams for delta in rig.deltas("uses"))
    rig.assert_nothing_left()


def test_each_gateway_says_so_and_once_is_enough(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    for gateway in ("one", "two"):
        rig.ask(Distrust(peer_id=WRONG), gateway)
    assert [record.message for record in caplog.records] == [
        f"prefill worker {WRONG} computed wrongly: 0 cached KV blocks dropped"
    ]


def test_no_prefill_worker_may_say_so() -> None:
    rig = Rig()
    left_in_cache(rig, shipped(rig))
    rig.ask(Distrust(peer_id=WRONG), "another", Role.PREFILL)
    assert rig.blocks.ledger().num_cached == NUM_TOKENS // BLOCK


def test_another_start_of_it_is_trusted() -> None:
    rig = Rig()
    rig.ask(Distrust(peer_id=WRONG))
    rig.ask(offer("more", TOKENS), "prefill-2", Role.PREFILL)
    assert len(rig.told(Grant)) == 1
