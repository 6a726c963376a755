"""What every socket of a link has in common."""

from __future__ import annotations

import zmq

from kvrelay.wire.codec import MAX_CONTROL_FRAME_NBYTES
from kvrelay.wire.settings import LinkSettings

_PROBES = 3
_HANDSHAKE_S = 5.0  # until a connection has said who it is; ZeroMQ's own bound is 30 s
_BACKLOG = 1024  # connections that the kernel holds for us; with ZeroMQ's 100, a crowd shuts everybody else out
_SEND_QUEUE = 100_000  # messages to one peer; a peer that reads nothing is lost long before


def close_dead_connections(socket: zmq.Socket[bytes], after_s: float) -> None:
    """Let the kernel end connections whose other machine is gone: probes after ``after_s`` of silence, and again as long.

    ZeroMQ's heartbeats do the same in userland, and wake a thread at both ends for each, on a connection from every prefill
    worker to every decode worker. That a process hangs whose kernel answers is for :mod:`kvrelay.wire.control.client` to find out.
    """
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, max(1, round(after_s)))
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, max(1, round(after_s / _PROBES)))
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, _PROBES)


def bound_strangers(socket: zmq.Socket[bytes]) -> None:
    """What a socket sets before it binds where strangers can reach it: who says nothing holds a descriptor for 5 s only.

    How many connections there are at a time, ZeroMQ does not bound: the process's limit on descriptors does
    (:mod:`kvrelay.common.system`).
    """
    socket.setsockopt(zmq.HANDSHAKE_IVL, round(_HANDSHAKE_S * 1000))
    socket.setsockopt(zmq.BACKLOG, _BACKLOG)


def configure_control(socket: zmq.Socket[bytes], settings: LinkSettings) -> None:
    """What both ends of a control link set, before they bind or connect."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_CONTROL_FRAME_NBYTES)
    close_dead_connections(socket, settings.peer_timeout_s)
