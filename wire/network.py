"""What a process talks to others with: ZeroMQ's context, the sockets that are made of it, and the clock that links wait by.

An entry point opens the real one, which the component closes. The simulation brings one of its own, in virtual time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import zmq

from kvrelay.common.clock import Clock
from kvrelay.wire.lines.block_sender import BlockSender
from kvrelay.wire.lines.data_plane import BlockReceiver
from kvrelay.wire.loop_socket import LoopSocket

_MAX_SOCKETS = 16_384  # ZeroMQ's own bound, 1,023, is that of some 300 decode workers


@dataclass(frozen=True, slots=True)
class Network:
    """One process's. Its fields are what the real one has; a simulated one has their like."""

    clock: Clock
    context: zmq.Context[zmq.Socket[bytes]]
    loop_socket: type[LoopSocket]
    block_sender: type[BlockSender]
    block_receiver: type[BlockReceiver]

    @classmethod
    def open(cls) -> Network:
        """The real one. ``close`` it once."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.max_sockets = _MAX_SOCKETS
        return cls(time.monotonic, context, LoopSocket, BlockSender, BlockReceiver)

    def close(self) -> None:
        """Wait for what is queued, and end the network threads. All sockets must be closed already; may take a moment."""
        self.context.term()
