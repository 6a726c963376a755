"""CURVE on control links: whose key a peer has is its role, and everything is encrypted.

A server's context has one :class:`PeerGate`, which answers ZeroMQ's question (ZAP, RFC 27) whether a key may connect. With each
message comes what it answered: the role of the key, which the peer cannot choose.
"""

from __future__ import annotations

import itertools
import logging

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from kvrelay.wire.keys import WireKeys
from kvrelay.wire.messages import Role
from kvrelay.wire.metrics import WireMetrics

logger = logging.getLogger(__name__)

_DOMAIN = "kvrelay"
_MAX_NAMED = 1000  # strangers that are logged, a line each


class PeerGate(ThreadAuthenticator):
    """Lets in whose key is that of one of ``roles``, on a thread of its own.

    ``start`` once, before a socket of the context listens; ``stop`` once.
    """

    def __init__(
        self,
        keys: WireKeys,
        roles: frozenset[Role],
        metrics: WireMetrics,
        context: zmq.Context[zmq.Socket[bytes]],
    ) -> None:
        super().__init__(context)
        self._keys = keys
        self._roles = roles
        self._metrics = metrics
        self._strangers: set[bytes] = set()
        self.configure_curve_callback(_DOMAIN, self)

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Make ``socket`` a server that only takes CURVE, before it is bound."""
        socket.curve_server = True
        socket.curve_secretkey = self._keys.secret
        socket.zap_domain = _DOMAIN.encode()

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether the key may connect (pyzmq's name for it)."""
        role = self._keys.role_of(key)
        if role in self._roles:
            return True
        self._metrics.refused_keys.inc()
        if key not in self._strangers and len(self._strangers) < _MAX_NAMED:
            self._strangers.add(key)
            whose = "nobody here knows" if role is None else f"a {role}'s, which has no business here"
            logger.warning("refused a connection with the key %s: %s", key.decode(errors="replace"), whose)
        return False

    def curve_user_id(self, client_public_key: bytes) -> str:
        """What comes with every message of that key: its role."""
        return self._keys.role_of(z85.encode(client_public_key)) or ""


def receive_with_role(socket: zmq.Socket[bytes]) -> list[bytes]:
    """One message of a guarded socket, its sender's role as the last frame. Raises zmq.Again."""
    frames = socket.recv_multipart(zmq.DONTWAIT, copy=False)
    return [*(frame.bytes for frame in frames), str(frames[-1].get("User-Id")).encode()]


WATCHED_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


def handshake_problem(event: list[bytes], proof: ClientProof | None) -> str | None:
    """What a client's monitor says of the keys, one of ``WATCHED_EVENTS``; None if it says nothing of them."""
    kind = parse_monitor_message(event)["event"]
    if kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "it does not let our key in"
    if kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return "it asks for keys, and we have none" if proof is None else "it has no keys, and we have"
    if kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and proof is not None:
        return "its key is not one of those that we know for its role"
    return None


class ClientProof:
    """What a client shows, and what it asks of its server: to be a worker of ``server_role``."""

    def __init__(self, keys: WireKeys, server_role: Role) -> None:
        self._keys = keys
        # One at a connection: which of several keys a server has by now, only trying tells.
        self._server_keys = itertools.cycle(keys.peers[server_role])
        self.num_server_keys = len(keys.peers[server_role])

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Make ``socket`` a client that only talks CURVE, before it connects."""
        socket.curve_serverkey = next(self._server_keys)
        socket.curve_publickey = self._keys.public
        socket.curve_secretkey = self._keys.secret
