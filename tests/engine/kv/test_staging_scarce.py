"""When slow readers are asked to copy their blocks so that slots become free, the cost of that check, and how much is pinned."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvrelay.common.errors import ModelError
from kvrelay.engine.kv.device import staging as staging_module
from kvrelay.engine.kv.device.copies import StagingPlan
from kvrelay.engine.kv.device.staging import Staging, pinned_pieces

from ..late_device import LateDevice
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


def test_memory_for_too_few_blocks_is_refused_with_the_way_out() -> None:
    blocks = torch.zeros(8, 2**20, dtype=torch.uint8)
    with pytest.raises(ModelError, match=r"gives 3 buffers of 1\.00 MiB, .* at least 4 are needed: raise it to 4"):
        Staging(blocks, StagingPlan(LateDevice(), 3 * 2**20), [1])
    assert Staging(torch.zeros(8, 2**26, dtype=torch.uint8), StagingPlan(_Frugal()), [1]).num_slots == 4
    assert Staging(blocks, StagingPlan(_Frugal()), [1]).num_slots == 256


def test_memory_that_cannot_be_pinned_is_refused_with_the_way_out() -> None:
    class NoRoom(LateDevice):
        def pinned(self, nbytes: int) -> torch.Tensor:
            raise RuntimeError("out of memory")

    with pytest.raises(ModelError, match=r"cannot pin 4 MiB of host memory \(out of memory\): lower --staging-mb"):
        Staging(torch.zeros(8, 2**20, dtype=torch.uint8), StagingPlan(NoRoom(), 2**22), [1])


@pytest.mark.parametrize(
    ("num_slots", "slot_nbytes"), [(150, 2**21), (4, 3 * 2**19), (170, 3 * 2**19), (1, 5), (128, 2**21)]
)
def test_what_is_pinned_is_hardly_more_than_what_was_asked_for(num_slots: int, slot_nbytes: int) -> None:
    pieces = pinned_pieces(num_slots, slot_nbytes)
    assert sum(pieces) == num_slots
    taken = sum(1 << (piece * slot_nbytes - 1).bit_length() for piece in pieces)  # as torch rounds
    assert num_slots * slot_nbytes <= taken <= (num_slots + len(pieces)) * slot_nbytes


class _Frugal(LateDevice):
    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")
