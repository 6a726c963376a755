"""Blocks that come in pieces, one of each group. A block is received when all its pieces are, and each piece has its place."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from kvrelay.wire.blocks.frames import parse_header
from kvrelay.wire.messages import FailureCode

from ..lease_bench import NUM_TOKENS, TWO_PIECES, LeaseBench

ALL = list(product(range(3), range(2)))  # (block, piece) of NUM_TOKENS tokens


@pytest.fixture(params=[False, True], ids=["plain", "sealed"])
def bench(request: pytest.FixtureRequest) -> LeaseBench:
    return LeaseBench(seals_kv=request.param, pieces=TWO_PIECES)


@pytest.mark.parametrize("last", ALL)
def test_a_lease_is_verified_with_the_last_piece_of_its_blocks(bench: LeaseBench, last: tuple[int, int]) -> None:
    lease = bench.leased()
    for block, piece in ALL:
        if (block, piece) != last:
            assert bench.receive(lease.frames(block, piece=piece)) == "ok"
    bench.table.commit("p", lease.commit())
    assert bench.table.snapshot()[0]["received"] == bench.counted("kv_blocks_received") == 2
    assert bench.ends.verified.empty(), "verified without a piece"
    assert bench.receive(lease.frames(last[0], piece=last[1])) == "ok"
    bench.assert_verified(lease)
    assert bench.counted("kv_blocks_received") == 3


def test_a_cached_block_needs_no_piece(bench: LeaseBench) -> None:
    first = bench.leased()
    bench.table.commit("p", first.commit())
    assert {bench.receive(first.frames(block, piece=piece)) for block, piece in ALL} == {"ok"}
    bench.assert_verified(first)
    again = bench.leased(request_id="again")
    assert again.grant.num_cached_blocks == NUM_TOKENS // 4
    assert bench.receive(again.frames(1, piece=1)) == "duplicate"
    bench.table.commit("p", again.commit())
    assert [bench.receive(again.frames(2, piece=piece)) for piece in (1, 0)] == ["ok", "ok"]
    bench.assert_verified(again)


def test_pieces_of_one_block_are_written_side_by_side(bench: LeaseBench) -> None:
    lease = bench.leased()
    frames = [lease.frames(0, piece=piece) for piece in range(2)]
    headers = [parse_header(header) for header, _ in frames]
    for header in headers:
        bench.table.begin_piece(header)
    for header, (_, payload) in zip(headers, frames, strict=True):
        bench.table.write_piece(header, memoryview(payload))()
    assert [bench.receive(one) for one in frames] == ["duplicate", "duplicate"]


@pytest.mark.parametrize(("piece_index", "cause"), [(2, "wrong_piece"), (2**16 - 1, "wrong_piece"), (0, "bad_size")])
def test_a_piece_that_the_lease_does_not_take_is_refused_and_counted(
    bench: LeaseBench, piece_index: int, cause: str
) -> None:
    """The frame is the second piece, with a wrong index. A sealed lease is still verified afterwards."""
    lease = bench.leased()
    assert bench.receive(lease.frames(0, piece=1, piece_index=piece_index)) == cause
    assert bench.refused(cause) == 1
    assert bench.store.num_write_opens == 0
    if not bench.table.seals_kv:
        assert bench.ends.rejected.get_nowait().code is FailureCode.INTEGRITY
        bench.assert_all_free()
        return
    bench.table.commit("p", lease.commit())
    assert {bench.receive(lease.frames(block, piece=piece)) for block, piece in ALL} == {"ok"}
    bench.assert_verified(lease)


def test_a_sealed_piece_opens_in_no_other_place() -> None:
    """A sealed payload comes with the header of another piece of the same size. The seal does not open."""
    sealed = LeaseBench(seals_kv=True, pieces=(*TWO_PIECES, replace(TWO_PIECES[0], group=2)))
    lease = sealed.leased()
    for piece, other in ((0, 2), (2, 0)):
        assert sealed.receive((lease.frames(0, piece=other)[0], lease.frames(0, piece=piece)[1])) == "bad_seal"
