"""Options that every socket of a link has."""

from __future__ import annotations

import errno

import zmq

from kvrelay.common.errors import SettingsError
from kvrelay.wire.addresses import has_port, is_ipv6, with_brackets
from kvrelay.wire.codec import MAX_CONTROL_FRAME_NBYTES
from kvrelay.wire.settings import LinkSettings

_PROBES = 3
_HANDSHAKE_S = 5.0  # longest handshake of a connection; ZeroMQ's default is 30 s
_BACKLOG = 1024  # connections that wait in the kernel; ZeroMQ's default, 100, lets a crowd lock out everybody else
_SEND_QUEUE = 100_000  # messages to one peer; a peer that reads nothing counts as lost long before


def close_dead_connections(socket: zmq.Socket[bytes], after_s: float) -> None:
    """Let the kernel end connections whose other machine is gone: probes after ``after_s`` of silence, and again as long.

    ZeroMQ's heartbeats do the same in userland, but each one wakes a thread at both ends, on a connection from every prefill worker
    to every decode worker. A process that hangs while its kernel answers is noticed by :mod:`kvrelay.wire.control.client`.
    """
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, max(1, round(after_s)))
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, max(1, round(after_s / _PROBES)))
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, _PROBES)


def bound_strangers(socket: zmq.Socket[bytes]) -> None:
    """Limit what strangers can hold; call it before the socket binds. A connection without a handshake ends after 5 s.

    ZeroMQ does not bound the number of connections. The process's limit on descriptors does (:mod:`kvrelay.common.system`).
    """
    socket.setsockopt(zmq.HANDSHAKE_IVL, round(_HANDSHAKE_S * 1000))
    socket.setsockopt(zmq.BACKLOG, _BACKLOG)


def allow_family(socket: zmq.Socket[bytes], address: str) -> None:
    """Let ``socket`` use ``address`` if that is an IPv6 one; call it before it binds or connects.

    Not for all addresses: ZeroMQ would look up names as IPv6 only, such as ``localhost``, where a worker may listen on IPv4.
    """
    socket.setsockopt(zmq.IPV6, int(is_ipv6(address)))


def check_listenable(address: str, setting: str) -> None:
    """Check that a worker can listen on ``address``, by doing it for a moment: a model may take minutes to load.

    ``ipc://`` is not tried: ZeroMQ would take the path from the process that listens there. Raises SettingsError that names the
    ``setting``.
    """
    if address.startswith(("ipc://", "inproc://")):
        return
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        if not has_port(address):
            raise zmq.ZMQError(errno.EINVAL)
        with context.socket(zmq.ROUTER) as probe:
            allow_family(probe, with_brackets(address))
            probe.bind(with_brackets(address))
    except zmq.ZMQError as error:
        reason = zmq.strerror(error.errno or errno.EINVAL)
        raise SettingsError(
            f"{setting}: cannot listen on {address} ({reason}); write tcp://HOST:PORT with an address of this machine and a free "
            "port, such as tcp://127.0.0.1:7100, or ipc://PATH"
        ) from error
    finally:
        context.term()  # returns when the port is free again


def configure_control(
    socket: zmq.Socket[bytes], settings: LinkSettings, max_frame_nbytes: int = MAX_CONTROL_FRAME_NBYTES
) -> None:
    """Set the options of both ends of a control link. Call it before the socket binds or connects.

    ``max_frame_nbytes``: the largest frame to receive; a peer that sends a larger one is disconnected.
    """
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_nbytes)
    close_dead_connections(socket, settings.peer_timeout_s)
