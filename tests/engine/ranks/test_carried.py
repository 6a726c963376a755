"""Blocks of a rank on another host, over a device that copies as late as a GPU may, and over host memory."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvrelay.engine.kv.gathered import GatheredStore, HostPart
from kvrelay.engine.ranks.carried import BlockCarrier, CarriedBlocks, Moved, ToCarrier
from kvrelay.engine.ranks.link import Link, sealed_link
from kvrelay.engine.ranks.messages import Alive
from kvrelay.engine.ranks.seal import Seal, agree
from tests.engine.kv.test_fragments import NUM_BLOCKS, geometry
from tests.engine.late_device import LateDevice

from .rig import SOON_S, expect_errors_of_copies, expect_whole_blocks

MakeRank = Callable[[torch.Tensor, LateDevice | None], CarriedBlocks]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = socket.create_connection(listening.getsockname())
        theirs, _ = listening.accept()
        return ours, theirs


def sealed_pair(ours_kinds: object, theirs_kinds: object, *secrets: bytes) -> tuple[Link[Moved], Link[ToCarrier]]:
    """Both ends over TCP, one with the first of ``secrets`` and one with the last."""
    ours, theirs = tcp_pair()
    made: list[Link[ToCarrier]] = []
    thread = threading.Thread(target=lambda: made.append(sealed_link(theirs, theirs_kinds, secrets[-1], calls=False)))
    thread.start()
    link = sealed_link(ours, ours_kinds, secrets[0], calls=True)
    thread.join()
    return link, made[0]


@pytest.fixture
def rank_of() -> Iterator[MakeRank]:
    """Makes the leader's end of a rank with such a pool."""
    links: list[Link[Moved]] = []
    others: list[Link[ToCarrier]] = []
    threads: list[threading.Thread] = []

    def make(blocks: torch.Tensor, device: LateDevice | None) -> CarriedBlocks:
        ours, theirs = sealed_pair(Moved, ToCarrier, b"secret")
        links.append(ours)
        others.append(theirs)
        carrier = BlockCarrier(theirs)
        carrier.give(blocks, device)
        threads.append(threading.Thread(target=carrier.serve))
        threads[-1].start()
        return CarriedBlocks(ours, blocks.shape[1])

    yield make
    for link in links:
        link.shut()
    for thread in threads:
        thread.join()
    for link in links:
        link.close()
    for other in others:
        other.close()


@pytest.mark.parametrize("is_late", [False, True], ids=["host", "device"])
def test_blocks_are_put_together_from_a_rank_elsewhere_and_taken_apart_for_it(rank_of: MakeRank, is_late: bool) -> None:
    layout = geometry("one", 2)
    pools = [torch.zeros(NUM_BLOCKS, layout.physical_nbytes // 2, dtype=torch.uint8) for _ in range(2)]
    device = LateDevice(random.Random(2)) if is_late else None
    parts = [HostPart(pools[0].numpy()), rank_of(pools[1], device)]
    expect_whole_blocks(GatheredStore(layout, NUM_BLOCKS, parts), pools, layout)


def test_a_copy_that_fails_and_a_rank_that_is_gone_are_errors(rank_of: MakeRank) -> None:
    layout = geometry("one", 2)
    pools = [torch.zeros(NUM_BLOCKS, layout.physical_nbytes // 2, dtype=torch.uint8) for _ in range(2)]
    remote = rank_of(pools[1], LateDevice(fails_at=2))
    store = GatheredStore(layout, NUM_BLOCKS, [HostPart(pools[0].numpy()), remote])
    expect_errors_of_copies(store, remote, layout)


def test_a_block_that_the_rank_cannot_serve_ends_the_wait_for_it() -> None:
    """The rank cannot serve the block, because it has loaded nothing."""
    ours, theirs = sealed_pair(Moved, ToCarrier, b"")
    with ThreadPoolExecutor(2) as threads:
        try:
            serving = threads.submit(BlockCarrier(theirs).serve)
            waiting = threads.submit(CarriedBlocks(ours, 8).reading(3).__enter__)
            with pytest.raises(RuntimeError, match="a rank is gone, and its part of block 3"):
                waiting.result(SOON_S)
            with pytest.raises(AssertionError, match="the leader asks for block 3"):
                serving.result(SOON_S)
        finally:
            ours.shut()
            ours.close()
            theirs.close()


def test_a_leader_that_falls_silent_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.engine.ranks.carried.SILENT_S", 0.3)
    ours, theirs = sealed_pair(Moved, ToCarrier, b"")
    began_s = time.monotonic()
    ours.send(Alive(0))
    try:
        assert BlockCarrier(theirs).serve() == "the leader has been silent for 0.3 s: it hangs, or its host is gone"
        assert time.monotonic() - began_s >= 0.3
    finally:
        ours.close()
        theirs.close()


def test_who_has_another_secret_is_told_nothing_and_believed_nothing() -> None:
    ours, theirs = sealed_pair(Moved, ToCarrier, b"one", b"another")
    try:
        ours.send(Alive(7))
        with pytest.raises(EOFError, match="the other end has another secret"):
            theirs.receive(SOON_S)
    finally:
        ours.close()
        theirs.close()


def test_what_travels_is_unreadable_and_cannot_be_sent_again() -> None:
    ours, theirs = socket.socketpair()
    made: list[Seal] = []
    with ours, theirs:
        thread = threading.Thread(target=lambda: made.append(agree(theirs, b"secret", calls=False)))
        thread.start()
        near = agree(ours, b"secret", calls=True)
        thread.join()
    (far,) = made
    first, second = near.close(b"a block of somebody's prompt"), near.close(b"another")
    assert b"somebody" not in first
    assert far.open(first) == b"a block of somebody's prompt"
    for wrong in (first, second[:-1] + bytes([second[-1] ^ 1])):
        with pytest.raises(EOFError):
            far.open(wrong)
