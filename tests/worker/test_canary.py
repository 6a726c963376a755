"""The canary finds a changed bit, gives way to requests, and leaves no blocks behind."""

from __future__ import annotations

import pytest

from kvrelay.engine.fake.engine import fake_card
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.owners import Owner, OwnerKind
from kvrelay.engine.step.leader import Leader
from kvrelay.worker.canary import Canary, CanaryPlan

from .broken import BreakableEngine

PERIOD_S = 60.0
OTHER = Owner(OwnerKind.SEQUENCE, "other/1")


class Rig:
    """A canary over a fake engine that can break. ``run`` computes one whole canary if one is due."""

    def __init__(self, windows: tuple[int | None, ...] = (None,), num_tokens: int = 4) -> None:
        self.now_s = 5.0
        self.num_steps = 0
        card = fake_card(num_blocks=40, windows=windows)
        self.engine = BreakableEngine(card, on_step=self._count)
        self.blocks = BlockManager(40 * len(windows), 4, lambda: self.now_s, windows=windows)
        self.canary = Canary(
            CanaryPlan(PERIOD_S, 512, num_tokens), Leader(self.engine), self.blocks, lambda: self.now_s
        )

    def _count(self, _: object) -> None:
        self.num_steps += 1

    def run(self) -> bool | None:
        verdict = self.canary.step()
        while self.canary.is_under_way:
            verdict = self.canary.step()
        return verdict


@pytest.mark.parametrize("windows", [(None,), (None, 8), (12,)])
def test_a_changed_bit_of_kv_is_found(windows: tuple[int | None, ...]) -> None:
    rig = Rig(windows)
    assert rig.run() is True
    rig.now_s += PERIOD_S
    assert rig.run() is True
    rig.engine.is_broken = True
    rig.now_s += PERIOD_S
    assert rig.run() is False


def test_it_computes_once_a_period_a_token_a_step() -> None:
    rig = Rig()
    assert rig.run() is True
    assert rig.num_steps == 4
    rig.now_s += PERIOD_S - 1
    assert rig.run() is None
    assert rig.num_steps == 4
    rig.now_s += 1
    assert rig.run() is True
    assert rig.num_steps == 8


def test_it_leaves_no_block_and_publishes_none() -> None:
    rig = Rig()
    rig.run()
    assert rig.blocks.ledger().num_free == 40
    rig.blocks.check_integrity()


def test_what_lay_in_its_blocks_does_not_matter() -> None:
    rig = Rig(windows=(None, 8))
    assert rig.run() is True
    for block_id in range(80):
        rig.engine.store.block(block_id)[:] = bytes([block_id + 1]) * rig.engine.store.block_nbytes
    rig.now_s += PERIOD_S
    assert rig.run() is True


def test_whoever_has_work_takes_its_place_and_it_begins_anew() -> None:
    rig = Rig()
    assert rig.canary.step() is None
    assert rig.canary.is_under_way
    rig.canary.abandon()
    assert rig.blocks.ledger().num_free == 40
    assert rig.run() is True
    assert rig.num_steps == 1 + 4


def test_it_waits_while_half_of_the_blocks_are_in_use() -> None:
    rig = Rig()
    rig.blocks.allocate(OTHER, 20)
    assert rig.run() is None
    assert not rig.num_steps
    rig.blocks.release(OTHER)
    assert rig.run() is True


def test_a_step_that_fails_is_no_verdict() -> None:
    rig = Rig()
    rig.run()

    def fail(_: object) -> None:
        raise RuntimeError("out of memory")

    rig.engine._on_step = fail
    rig.now_s += PERIOD_S
    with pytest.raises(RuntimeError, match="out of memory"):
        rig.run()
    assert not rig.canary.is_under_way
    assert rig.blocks.ledger().num_free == 40
    rig.engine._on_step = rig._count
    assert rig.run() is None  # the next one is due after a whole period
    rig.now_s += PERIOD_S
    assert rig.run() is True
