"""When slow readers are asked to copy their blocks so that slots become free, and the cost of that check."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvrelay.engine.kv import staging as staging_module

from .test_staging import Bench, Ticket, until


def test_readers_that_may_take_long_are_told_when_they_hold_a_quarter_of_the_slots() -> None:
    bench = Bench(num_slots=8)
    tickets = [Ticket() for _ in range(3)]
    reads = [bench.open_read(block_id) for block_id in range(16)]
    for read, ticket, is_scarce in zip(reads, tickets, (False, False, True), strict=False):
        bench.wait(read, ticket)
        assert read.is_scarce is is_scarce
    tickets[2].is_done = True  # it was asked, and has copied the block
    for read in reads[3:12]:
        ticket = Ticket()
        assert read.wait(ticket, 0.0) is not None, "no slot is left"
        ticket.is_done = True
    tickets[0].is_done = True
    until(lambda: not reads[3].is_scarce)  # checked again after a moment, not for every block


class LookedAt:
    """Counts the calls of ``is_done``. Implements Reader."""

    def __init__(self) -> None:
        self.num_looks = 0

    @property
    def is_done(self) -> bool:
        self.num_looks += 1
        return False


def test_slots_that_are_held_for_long_are_not_looked_at_for_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_module, "time", SimpleNamespace(monotonic=lambda: 1000.0))  # a clock that stands still
    bench = Bench(num_slots=16)
    held = [LookedAt() for _ in range(5)]
    for block_id, reader in enumerate(held):
        assert bench.open_read(block_id).wait(reader, 0.0) is not None
    asks = bench.open_read(9)
    assert asks.wait(Ticket(), 0.0) is not None
    for reader in held:
        reader.num_looks = 0
    assert all(asks.is_scarce for _ in range(100))
    assert [reader.num_looks for reader in held] == [1] * 5
