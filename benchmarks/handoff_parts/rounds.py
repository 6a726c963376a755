"""The measurement of a hand-off: the way of the blocks, and the rounds of a sending and a receiving process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol

from handoff_parts.sides import Side, heard


@dataclass(frozen=True, slots=True)
class Way:
    """A way to move blocks, by a name of :mod:`handoff`."""

    name: str

    @property
    def is_plain(self) -> bool:
        """Whether it works without kvrelay."""
        return self.name.startswith("frames")

    @property
    def is_shared(self) -> bool:
        """Whether it uses shared memory."""
        return self.name.startswith("shared")

    @property
    def seals_kv(self) -> bool:
        """Whether it uses AES-256-GCM."""
        return self.name.endswith("sealed")


@dataclass(frozen=True, slots=True)
class Round:
    """One way's figures in one round."""

    seconds: float
    sender_cpu_s: float
    receiver_cpu_s: float


def run_round(sender: Side, receiver: Side, digest: str | None = None) -> Round:
    """Run one round of two processes that run ``receive_rounds`` and ``send_rounds``.

    ``digest``: of the sent bytes. With it the receiver's pool is cleared before. RuntimeError if the pool has other bytes
    afterwards.
    """
    receiver.tell(digest is not None)
    receiver.hear()
    sender.tell(True)
    receiver_cpu_s, received = receiver.hear()
    seconds, sender_cpu_s = sender.hear()
    if received != digest:
        raise RuntimeError(f"the receiver's pool does not hold what was sent ({received})")
    return Round(seconds, sender_cpu_s, receiver_cpu_s)


class Receiver(Protocol):
    """The receiving end of a way."""

    def run(self) -> None:
        """Receive one round."""

    def close(self) -> None:
        """End it."""


class Sender(Protocol):
    """The sending end of a way."""

    def run(self) -> float:
        """Send one round. Returns its seconds."""

    def close(self) -> None:
        """End it."""


def receive_rounds(
    parent: Connection,
    receiver: Receiver,
    clear: Callable[[], None],
    digest: Callable[[], str],
) -> None:
    """Receive a round for every message of the parent, until None. If the message is true, clear the pool and report its digest."""
    for is_checked in heard(parent):
        if is_checked:
            clear()
        parent.send(None)  # ready
        cpu_s = time.process_time()
        receiver.run()
        cpu_s = time.process_time() - cpu_s
        parent.send((cpu_s, digest() if is_checked else None))
    receiver.close()


def send_rounds(parent: Connection, sender: Sender) -> None:
    """Send a round for every message of the parent, until None. Reports its seconds and this process's CPU seconds."""
    for _ in heard(parent):
        cpu_s = time.process_time()
        seconds = sender.run()
        parent.send((seconds, time.process_time() - cpu_s))
    sender.close()
