"""Waiting and running sequences. :mod:`kvrelay.common.fair_queue` orders the waiting ones. Knows no blocks."""

from __future__ import annotations

import bisect
import math

from kvrelay.common.fair_queue import FairQueue, seniority
from kvrelay.engine.step.sequence import Sequence, SequenceStatus


class Places:
    """A worker's waiting sequences in fair order, and its running sequences, the most senior first."""

    def __init__(self) -> None:
        self.fair = FairQueue()
        self.now_s = -math.inf  # time of the last ``sort``
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    def wait(self, sequence: Sequence) -> None:
        """Add ``sequence`` to the waiting ones."""
        if sequence.tags.start is None:
            self.fair.come(sequence)
        self.waiting.append(sequence)
        self.sort(max(self.now_s, sequence.arrival_s))

    def sort(self, now_s: float) -> None:
        """Order the waiting sequences. Needed when one has come, and before each step because classes age."""
        self.now_s = now_s
        if len(self.waiting) > 1:
            self.waiting = self.fair.in_order(self.waiting, now_s)

    def begin(self, sequence: Sequence, now_s: float) -> None:
        """Move a waiting sequence, which has blocks, to the running ones."""
        self.waiting.remove(sequence)
        self.fair.begin(sequence, now_s)
        self.run(sequence)

    def run(self, sequence: Sequence) -> None:
        """Add a sequence with blocks to the running ones."""
        sequence.set_status(SequenceStatus.RUNNING)
        bisect.insort(self.running, sequence, key=seniority)

    def stop(self, sequence: Sequence) -> None:
        """Move a running sequence, which keeps its blocks, to the waiting ones."""
        self.running.remove(sequence)
        sequence.set_status(SequenceStatus.WAITING)
        self.wait(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Remove the sequence, waiting or running. Its blocks stay held."""
        for place in (self.waiting, self.running):
            if sequence in place:
                place.remove(sequence)
        sequence.set_status(SequenceStatus.FINISHED)
