"""One block that waits to be sent."""

from __future__ import annotations

import threading

from kvrelay.wire.blocks.frames import BlockHeader
from kvrelay.wire.blocks.send_job import SendJob, SendTicket, Wakeup

from ..lease_bench import WAIT_S
from ..sending import NeverThere


def test_a_block_that_waits_for_memory_can_be_called_off() -> None:
    """A sender waits for a block's bytes. When the ticket is called off, the wait ends without bytes."""

    payload, wakeup = NeverThere(), Wakeup()
    job = SendJob(SendTicket(), BlockHeader(1, 1, 0, 8, b"h" * 16), payload, None)
    assert job.ticket.take()
    got: list[memoryview | None] = []
    thread = threading.Thread(target=lambda: got.append(job.wait(wakeup, lambda: None)))
    thread.start()
    assert payload.is_awaited.wait(WAIT_S)
    job.ticket.call_off()
    thread.join(WAIT_S)
    assert got == [None]
    assert job.ticket.is_done
    assert not wakeup.is_set
    wakeup.close()
