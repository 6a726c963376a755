"""A process's access to the network: ZeroMQ's context, the classes of sockets, and the clock for time-outs.

An entry point opens the real network, and the component closes it. The simulation has its own, in virtual time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import zmq

from kvrelay.common.clock import Clock
from kvrelay.wire.lines.block_sender import BlockSender
from kvrelay.wire.lines.data_plane import BlockReceiver
from kvrelay.wire.loop_socket import LoopSocket

_MAX_SOCKETS = 16_384  # ZeroMQ's default, 1,023, is enough for some 300 decode workers


@dataclass(frozen=True, slots=True)
class Network:
    """One for each process. The types are those of the real network; the simulation puts stand-ins there."""

    clock: Clock
    context: zmq.Context[zmq.Socket[bytes]]
    loop_socket: type[LoopSocket]
    block_sender: type[BlockSender]
    block_receiver: type[BlockReceiver]

    @classmethod
    def open(cls) -> Network:
        """Open the real network. Call ``close`` once."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.max_sockets = _MAX_SOCKETS
        return cls(time.monotonic, context, LoopSocket, BlockSender, BlockReceiver)

    def close(self) -> None:
        """End the network threads. Blocks until queued messages have left. All sockets must be closed already."""
        self.context.term()
