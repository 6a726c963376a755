"""Waiting and running sequences. :mod:`kvrelay.common.fair_queue` orders the waiting ones. Knows no blocks."""

from __future__ import annotations

import bisect
import math

from kvrelay.common.fair_queue import FairQueue, seniority
from kvrelay.engine.step.sequence import Sequence, SequenceStatus


class Places:
    """Waiting sequences of one worker, in fair order, and running ones, the most senior first."""

    def __init__(self) -> None:
        self.fair = FairQueue()
        self.now_s = -math.inf  # when those that wait were last put in order
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    def wait(self, sequence: Sequence) -> None:
        """It stands in line from now on."""
        if sequence.tags.start is None:
            self.fair.come(sequence)
        self.waiting.append(sequence)
        self.sort(max(self.now_s, sequence.arrival_s))

    def sort(self, now_s: float) -> None:
        """Put those that wait in their order: when one has come and, since classes age, before each step."""
        self.now_s = now_s
        if len(self.waiting) > 1:
            self.waiting = self.fair.in_order(self.waiting, now_s)

    def begin(self, sequence: Sequence, now_s: float) -> None:
        """Its turn has come, and it has blocks: it leaves the line, and runs."""
        self.waiting.remove(sequence)
        self.fair.begin(sequence, now_s)
        self.run(sequence)

    def run(self, sequence: Sequence) -> None:
        """It has blocks, and a place from now on."""
        sequence.set_status(SequenceStatus.RUNNING)
        bisect.insort(self.running, sequence, key=seniority)

    def leave(self, sequence: Sequence) -> None:
        """Take it out, wherever it is; its blocks stay held."""
        for place in (self.waiting, self.running):
            if sequence in place:
                place.remove(sequence)
        sequence.set_status(SequenceStatus.FINISHED)
