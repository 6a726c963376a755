"""A block sender alone; the test plays its peer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import zmq
from prometheus_client import CollectorRegistry

from kvrelay.wire.blocks.frames import BlockHeader
from kvrelay.wire.blocks.seal import BlockSealer
from kvrelay.wire.blocks.send_job import SendTicket
from kvrelay.wire.lines.block_sender import BlockSender
from kvrelay.wire.metrics import WireMetrics

from .lease_bench import BLOCK_NBYTES, WAIT_S, until

NOWHERE = "tcp://127.0.0.1:9"


class Sending:
    """A sender, its metrics, and whether it has reported its end."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str = NOWHERE, **options: Any) -> None:
        self.registry = CollectorRegistry()
        self.has_told = threading.Event()
        metrics = WireMetrics(self.registry)
        self.sender = BlockSender(address, metrics=metrics, context=context, on_end=self.has_told.set, **options)
        self.num_sent = 0

    def send(
        self, num_blocks: int = 1, nbytes: int = BLOCK_NBYTES, payload: Any = None, sealer: BlockSealer | None = None
    ) -> list[SendTicket]:
        """Send blocks of ``b"k"``, or ``payload``. Their numbers go on from call to call."""
        payload = payload or memoryview(b"k" * nbytes)
        tickets: list[SendTicket] = []
        for _ in range(num_blocks):
            tickets.append(self.sender.send(header_for(payload, self.num_sent), payload, sealer))
            self.num_sent += 1
        return tickets

    def lines(self, path: str) -> float:
        return self.registry.get_sample_value("kvrelay_kv_data_lines_total", {"path": path}) or 0.0

    def blocks(self, path: str) -> float:
        return self.registry.get_sample_value("kvrelay_kv_blocks_sent_total", {"path": path}) or 0.0

    def assert_ends(self, tickets: Sequence[SendTicket]) -> None:
        """Check that the sender ends soon and releases all blocks."""
        assert self.has_told.wait(WAIT_S), "it does not notice"
        assert not self.sender.is_alive
        assert_all_done_soon(tickets)


def header_for(payload: Any, index: int = 0) -> BlockHeader:
    """A header for peers that do not check it."""
    nbytes = payload.nbytes
    return BlockHeader(lease_id=1, epoch=1, block_index=index, payload_nbytes=nbytes, block_hash=b"h" * 16)


def assert_all_done_soon(tickets: Sequence[SendTicket]) -> None:
    """Wait until the sender reads none of the blocks any more."""
    until(lambda: all(ticket.is_done for ticket in tickets), "a ticket that is never done")


class NeverThere:
    """Bytes that never arrive. Implements LateBytes."""

    nbytes = BLOCK_NBYTES
    is_scarce = False

    def __init__(self) -> None:
        self.is_awaited = threading.Event()

    def begin(self) -> None:
        pass

    def begin_copy_to(self, target: memoryview) -> None:
        pass

    def digests(self, nbytes: int) -> None:
        raise AssertionError("they never arrive")

    def wait(self, reader: object, timeout_s: float) -> None:
        self.is_awaited.set()
        threading.Event().wait(timeout_s)
