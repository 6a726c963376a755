"""The timings of a request over several attempts."""

from __future__ import annotations

from kvrelay.gateway.relay.request import AttemptNote, RequestTimings
from kvrelay.wire.messages import Timings


def test_the_first_attempt_counts_and_later_ones_are_told() -> None:
    timings = RequestTimings(received_s=100.0)
    timings.on_submit(100.0)
    first = timings.on_attempt(AttemptNote((), "", 100.0, 0, 1))
    assert timings.on_parts(Timings(queue_s=1.0, prefill_s=2.0), 103.0) == {"queue": 1.0, "prefill": 2.0}
    timings.on_submit(150.0)
    second = timings.on_attempt(AttemptNote((), "", 150.0, 1, 2))
    # A second attempt queues and prefills again. Only new parts are returned.
    assert timings.on_parts(Timings(queue_s=7.0, transfer_s=0.5), 158.0) == {"transfer": 0.5}
    assert [at_s for note in (first, second) for at_s, _ in note.heard] == [103.0, 158.0]
    body = timings.body()
    assert (body["attempts"], body["accept_s"], body["queue_s"], body["transfer_s"]) == (2, 0.0, 1.0, 0.5)
