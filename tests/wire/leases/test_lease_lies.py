"""Wrong frames at the lease table. A wrong block ends a plain lease; a sealed lease drops it and takes the genuine block."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from kvrelay.wire.blocks.frames import parse_header
from kvrelay.wire.blocks.seal import KEY_NBYTES, new_key
from kvrelay.wire.messages import FailureCode

from ..lease_bench import BLOCK_NBYTES, TTL_S, WAIT_S, Frames, Granted, LeaseBench

BAD_PAYLOAD = b"\xee" * BLOCK_NBYTES

Lie = Callable[[Granted], Frames]


def flip(frames: Frames, part: int, at: int) -> Frames:
    """The frames with one bit of the header (0) or the payload (1) changed."""
    bad = [bytearray(frame) for frame in frames]
    bad[part][at] ^= 1
    return bytes(bad[0]), bytes(bad[1])


# By lie: the cause that it is counted under, and its frames. All are about block 1.
PLAIN_LIES: dict[str, tuple[str, Lie]] = {
    "bytes": ("bad_checksum", lambda lease: lease.frames(1, BAD_PAYLOAD)),
    "another block's bytes": ("bad_checksum", lambda lease: lease.frames(1, lease.frames(2)[1])),
    "another block": ("wrong_block", lambda lease: lease.frames(1, block_hash=lease.offer.block_hashes[2])),
    "index": ("wrong_block", lambda lease: lease.frames(3)),
    "piece": ("wrong_piece", lambda lease: lease.frames(1, piece_index=1)),
    "announced size": ("bad_size", lambda lease: lease.frames(1, bytes(8), payload_nbytes=8)),
    "no payload": ("bad_size", lambda lease: lease.frames(1, b"")),
    "short": ("bad_size", lambda lease: lease.frames(1, BAD_PAYLOAD[1:])),
    "long": ("bad_size", lambda lease: lease.frames(1, BAD_PAYLOAD + b"x")),
    "sealed": ("wrong_seal", lambda lease: lease.frames(1, key=new_key())),
}
SEALED_LIES: dict[str, tuple[str, Lie]] = {
    "payload": ("bad_seal", lambda lease: flip(lease.frames(1), 1, 100)),
    "tag": ("bad_seal", lambda lease: flip(lease.frames(1), 1, BLOCK_NBYTES)),
    "hash": ("wrong_block", lambda lease: lease.frames(1, block_hash=b"x" * 16)),
    "header": ("wrong_block", lambda lease: flip(lease.frames(1), 0, 45)),
    "index": ("wrong_block", lambda lease: lease.frames(3)),
    "piece": ("wrong_piece", lambda lease: lease.frames(1, piece_index=1)),
    "key": ("bad_seal", lambda lease: lease.frames(1, key=new_key())),
    "swapped": ("bad_seal", lambda lease: (lease.frames(1)[0], lease.frames(2)[1])),
    "announced size": ("bad_size", lambda lease: lease.frames(1, payload_nbytes=8)),
    "truncated": ("bad_size", lambda lease: (lease.frames(1)[0], lease.frames(1)[1][:-1])),
    "no tag": ("bad_size", lambda lease: lease.frames(1, bytes(BLOCK_NBYTES))),
    "plain": ("wrong_seal", lambda lease: Granted(lease.offer, replace(lease.grant, seal_key=None)).frames(1)),
}


@pytest.fixture
def plain() -> LeaseBench:
    return LeaseBench()


@pytest.fixture
def sealed() -> LeaseBench:
    return LeaseBench(seals_kv=True)


# -- plain leases: a lie ends the lease --------------------------------------------------------------------------------


@pytest.mark.parametrize("lie", PLAIN_LIES)
def test_a_plain_lie_ends_the_lease_and_its_blocks_go_back(plain: LeaseBench, lie: str) -> None:
    cause, frames = PLAIN_LIES[lie]
    lease = plain.leased()
    assert plain.receive(lease.frames(0)) == "ok"
    assert plain.receive(frames(lease)) == cause
    assert plain.ends.rejected.get_nowait().code is FailureCode.INTEGRITY
    assert plain.refused(cause) == 1
    plain.assert_all_free()
    written = [block_id for block_id in range(16) if any(plain.store.block(block_id))]
    assert len(written) <= 2, "written beyond the block"


def test_an_announced_size_that_is_no_block_is_refused_before_the_write(plain: LeaseBench) -> None:
    plain.receive(plain.leased().frames(0, bytes(8), payload_nbytes=8))
    assert plain.store.num_write_opens == 0


# -- sealed leases: a lie ends nothing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("lie", SEALED_LIES)
def test_a_frame_that_does_not_authenticate_is_dropped_and_the_genuine_one_taken(sealed: LeaseBench, lie: str) -> None:
    cause, frames = SEALED_LIES[lie]
    lease = sealed.leased()
    assert sealed.receive(lease.frames(0)) == "ok"
    assert sealed.receive(frames(lease)) == cause
    assert sealed.refused(cause) == 1
    sealed.table.commit("p", lease.commit())
    assert sealed.ends.verified.empty(), "verified without the genuine block"
    assert [sealed.receive(lease.frames(index)) for index in (1, 2)] == ["ok", "ok"]
    sealed.assert_verified(lease)


def test_a_genuine_frame_waits_for_the_verdict_on_the_one_before_it(sealed: LeaseBench) -> None:
    """A second frame of a block waits while the first one is checked.

    It is taken if the first one was forged, and is a duplicate otherwise. The pool holds the genuine block.
    """
    lease = sealed.leased()
    header = parse_header(lease.frames(0)[0])
    told: list[str] = []
    for forged, expected in ((flip(lease.frames(0), 1, 7), "ok"), (lease.frames(1), "duplicate")):
        header = parse_header(forged[0])
        sealed.table.begin_piece(header)
        second = threading.Thread(
            target=lambda index=header.block_index: told.append(sealed.receive(lease.frames(index)))
        )
        second.start()
        second.join(0.02)
        assert second.is_alive(), "it did not wait"
        if expected == "ok":
            with pytest.raises(Exception, match=f"block {header.block_index} of lease"):
                sealed.table.write_piece(header, memoryview(forged[1]))()
        else:
            sealed.table.write_piece(header, memoryview(forged[1]))()
        second.join(WAIT_S)
        assert told.pop() == expected
    assert sealed.receive(lease.frames(2)) == "ok"
    sealed.table.commit("p", lease.commit())
    sealed.assert_verified(lease)


@pytest.mark.parametrize("end", ["abort", "a pool that fails"])
def test_who_waits_for_a_verdict_that_never_comes_is_let_go(
    sealed: LeaseBench, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = sealed.leased()
    frames = lease.frames(0)
    header = parse_header(frames[0])
    sealed.table.begin_piece(header)
    told: list[str] = []
    second = threading.Thread(target=lambda: told.append(sealed.receive(frames)))
    second.start()
    if end == "abort":
        sealed.table.abort_peer("p")
        sealed.table.write_piece(header, memoryview(frames[1]))()
    else:
        with monkeypatch.context() as broken:
            broken.setattr(sealed.store, "open_write", lambda block_id, group: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                sealed.table.write_piece(header, memoryview(frames[1]))()
    second.join(WAIT_S)
    assert told in ([["unknown_lease"]] if end == "abort" else [["ok"], []])


def test_a_committed_lease_that_had_a_frame_dropped_has_a_second_left(sealed: LeaseBench) -> None:
    lease = sealed.leased()
    assert sealed.receive(flip(lease.frames(0), 1, 0)) == "bad_seal"
    sealed.clock.now_s += 2.0  # before the commit the prefill worker may take longer than a second
    sealed.table.reap()
    sealed.table.commit("p", lease.commit())
    sealed.clock.now_s += 0.9
    assert sealed.receive(lease.frames(1)) == "ok"
    for _ in range(2):  # forged frames give the lease no more time
        sealed.clock.now_s += 0.5
        sealed.table.reap()
        sealed.receive(flip(lease.frames(0), 1, 0))
    sealed.table.reap()
    assert sealed.ends.rejected.get_nowait().code is FailureCode.INTEGRITY
    sealed.assert_all_free()


def test_a_frame_dropped_behind_the_commit_leaves_a_second_too(sealed: LeaseBench) -> None:
    lease, other = sealed.leased(), sealed.leased(request_id="other")
    for one in (lease, other):
        sealed.table.commit("p", one.commit())
    sealed.receive(flip(lease.frames(0), 1, 0))
    sealed.clock.now_s += 1.0
    sealed.table.reap()
    assert sealed.ends.rejected.get_nowait().key == ("r", 1)
    assert [entry["request_id"] for entry in sealed.table.snapshot()] == ["other"]
    sealed.clock.now_s += TTL_S
    sealed.table.reap()
    assert sealed.ends.rejected.get_nowait().code is FailureCode.LEASE_EXPIRED


def test_every_lease_has_a_key_and_an_id_that_nobody_guesses(sealed: LeaseBench) -> None:
    first, second = sealed.leased(), sealed.leased(request_id="b")
    assert first.grant.seal_key is not None
    assert len(first.grant.seal_key) == KEY_NBYTES
    assert first.grant.seal_key != second.grant.seal_key
    assert abs(first.grant.lease_id - second.grant.lease_id) > 2**32


def test_another_leases_block_does_not_pass(sealed: LeaseBench) -> None:
    """Two leases have the same tokens and epoch. A payload under the other lease's header fails, because each lease has a key."""
    first, second = sealed.leased(request_id="a"), sealed.leased(request_id="b")
    assert sealed.receive((second.frames(0)[0], first.frames(0)[1])) == "bad_seal"
    assert [sealed.receive(lease.frames(0)) for lease in (first, second)] == ["ok", "ok"]


# -- both --------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["plain", "sealed"])
def bench(request: pytest.FixtureRequest) -> LeaseBench:
    return LeaseBench(seals_kv=request.param)


def test_what_speaks_of_another_process_or_lease_is_dropped(bench: LeaseBench) -> None:
    lease = bench.leased()
    for cause, frames in (
        ("stale_epoch", lease.frames(0, epoch=lease.grant.epoch - 1)),
        ("unknown_lease", lease.frames(0, lease_id=99)),
    ):
        assert bench.receive(frames) == cause
        assert bench.refused(cause) == 1
    assert bench.store.num_write_opens == 0
    assert bench.receive(lease.frames(0)) == "ok"


def test_a_block_that_comes_again_is_dropped_before_it_is_written(bench: LeaseBench) -> None:
    lease = bench.leased()
    assert bench.receive(lease.frames(0)) == "ok"
    assert bench.receive(lease.frames(0)) == "duplicate"
    assert bench.refused("duplicate") == bench.store.num_write_opens == 1


def test_a_block_that_is_cached_here_is_not_overwritten(bench: LeaseBench) -> None:
    first = bench.leased()
    bench.table.commit("p", first.commit())
    assert [bench.receive(first.frames(index)) for index in range(3)] == ["ok"] * 3
    bench.assert_verified(first)
    assert bench.receive(first.frames(0, BAD_PAYLOAD)) == "unknown_lease"  # the first lease has ended
    again = bench.leased(request_id="again")
    assert again.grant.num_cached_blocks == 2
    assert bench.receive(again.frames(0, BAD_PAYLOAD)) == "duplicate"
    assert bench.store.num_write_opens == 3


def test_a_commit_must_name_the_offers_last_block_and_this_process(bench: LeaseBench) -> None:
    lease = bench.leased()
    bench.table.commit("p", lease.commit(epoch=lease.grant.epoch - 1))
    assert bench.table.snapshot()[0]["state"] == "granted"
    bench.table.commit("p", lease.commit(chain_hash=b"?" * 16))
    assert bench.ends.rejected.get_nowait().code is FailureCode.INTEGRITY
    bench.assert_all_free()
