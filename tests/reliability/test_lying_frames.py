"""Wrong frames at a lease table, under random events: changed, cut, mixed from two leases, or random bytes.

Their sender has no key and computes no new checksum. The machine of :mod:`tests.wire.leases.test_leases_at_random` checks after
each event that the books balance, that every lease ends once, and that a verified lease has the right bytes.

Some machines have a worker of several ranks, each of which holds a part of each block.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule

from kvrelay.common.kv_geometry import GroupKind, KvGeometry, KvGroup
from kvrelay.engine.kv.owners import Owner, OwnerKind
from kvrelay.wire.blocks.frames import parse_header

from ..wire.lease_bench import BLOCK_SIZE, TWO_WITH_WINDOW, LeaseBench, content_of
from ..wire.leases.test_leases_at_random import LeaseMachine, SealedLeaseMachine
from ..wire.test_handoff_ranks import RanksStore

Changes = dict[int, int]
CHANGES = st.dictionaries(st.integers(0, 600), st.integers(1, 255), min_size=1, max_size=3)
NONE = st.just(dict[int, int]())


def changed(part: bytes, changes: Changes) -> bytes:
    """``part`` with some bytes changed by an exclusive or."""
    wrong = bytearray(part)
    for place, turned in changes.items():
        wrong[place % len(wrong)] ^= turned
    return bytes(wrong)


class LyingMachine(LeaseMachine):
    """Leases are plain."""

    num_rejected = 0

    def on_lease_rejected(self, lease_id: int, *why: object) -> None:
        super().on_lease_rejected(lease_id, *why)
        self.num_rejected += 1

    @rule(
        one=LeaseMachine.leases,
        other=LeaseMachine.leases,
        index=st.integers(0, 2),
        piece=st.integers(0, 1),
        changes=st.sampled_from([(NONE, CHANGES), (CHANGES, NONE), (CHANGES, CHANGES), (NONE, NONE)]).flatmap(
            lambda parts: st.tuples(*parts)
        ),
        num_kept=st.sampled_from([1000, 1000, 1000, 100, 63, 0]),
    )
    def lie(
        self, one: int, other: int, index: int, piece: int, changes: tuple[Changes, Changes], num_kept: int
    ) -> None:
        """A frame comes with one lease's header and another's payload, changed and cut. It is only taken if its bytes are right."""
        if self.open:
            return  # this thread would wait for the open write
        frame = changed(self.grants[one].frames(index, piece=piece)[0], changes[0])
        payload = changed(self.grants[other].frames(index, piece=piece)[1], changes[1])[:num_kept]
        num_rejected = self.num_rejected
        if self.bench.receive((frame, payload)) == "ok":
            taken = parse_header(frame)
            part = self.pieces[taken.piece_index]
            owner = Owner(OwnerKind.LEASE, str(taken.lease_id))
            block_id = self.manager.owned_blocks(owner, part.group)[taken.block_index]
            assert block_id is not None, "a piece that nobody sees was taken"
            right = content_of(self.offers[taken.lease_id].block_hashes[taken.block_index])
            assert bytes(self.store.block(block_id))[: part.nbytes] == right[: part.nbytes], "other bytes were taken"
        assert not self.seals_kv or self.num_rejected == num_rejected, "who cannot seal has ended a lease"

    @rule(header=st.binary(max_size=100), payload=st.binary(max_size=600))
    def send_nonsense(self, header: bytes, payload: bytes) -> None:
        assert self.bench.receive((header, payload)) != "ok"


class TwoGroupsLyingMachine(LyingMachine):
    """The model has two groups of layers."""

    pieces = TWO_WITH_WINDOW


def group_of(layers: tuple[int, ...], size: int) -> KvGroup:
    """A group with four K/V heads."""
    return KvGroup(kind=GroupKind.FULL, layers=layers, num_kv_heads=4, key_size=size, value_size=size, dtype="uint8")


class RanksBench(LeaseBench):
    """A bench of a worker with two ranks in each of two stages. Each rank has a quarter of a block."""

    def new_store(self, num_blocks: int) -> Any:
        groups = (group_of((0, 1), 8), group_of((2, 3), 7))
        return RanksStore(num_blocks, KvGeometry(groups=groups, block_size=BLOCK_SIZE), num_ranks=2, num_stages=2)


class RanksLyingMachine(TwoGroupsLyingMachine):
    """The worker has several ranks, and the model two groups of layers."""

    bench_class = RanksBench


class SealedRanksLyingMachine(RanksLyingMachine, SealedLeaseMachine):
    """Leases are sealed, and the worker has several ranks."""


TestLyingFramesToRanks = RanksLyingMachine.TestCase
TestSealedLyingFramesToRanks = SealedRanksLyingMachine.TestCase
