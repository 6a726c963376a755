"""Who may connect: CURVE on control links, a token on data links.

A server's context has one :class:`PeerGate`, which answers ZeroMQ's question (ZAP, RFC 27) whether a peer may connect.

On a control link whose key a peer has is its role, and everything is encrypted. With each message comes the role of the key, which
the peer cannot choose. A data link is not encrypted by ZeroMQ, blocks are sealed; PLAIN (RFC 24) asks for a token at the handshake,
and leaves the frames behind it as they are. The token is made anew at every start of the process, and told to prefill workers
in ``Welcome``, on the control link. It keeps strangers out. Who can read the network can
read it, and then send blocks that no key has sealed.
"""

from __future__ import annotations

import hmac
import itertools
import logging
import secrets

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from kvrelay.wire.messages import Role
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.security.keys import WireKeys

logger = logging.getLogger(__name__)

_DOMAIN = "kvrelay"
_DATA_DOMAIN = "kvrelay-data"
_DATA_USER = b"prefill"
_TOKEN_NBYTES = 32
_MAX_NAMED = 1000  # strangers that get a log line


class PeerGate(ThreadAuthenticator):
    """Admits peers with a key of one of ``roles``, and on data sockets peers with the token. Runs on its own thread.

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
        self.data_token = secrets.token_hex(_TOKEN_NBYTES)  # a secret: for Welcome, and never for a log
        self._has_told = False  # whether a data connection without the token was logged
        self.configure_curve_callback(_DOMAIN, self)

    def stop(self) -> None:
        """End the thread. (pyzmq's own waits for ever to tell a thread that has died.)"""
        if self.pipe is not None and not self.is_alive():
            self.pipe.close()
            self.pipe = None  # type: ignore[assignment]
        super().stop()

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Make ``socket`` a server that only takes CURVE, before it is bound."""
        socket.curve_server = True
        socket.curve_secretkey = self._keys.secret
        socket.zap_domain = _DOMAIN.encode()

    def guard_data(self, socket: zmq.Socket[bytes]) -> None:
        """Make ``socket`` a server that only takes connections with the token, before it is bound."""
        socket.plain_server = True
        socket.zap_domain = _DATA_DOMAIN.encode()

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

    def _authenticate_plain(self, domain: str, username: str, password: str) -> tuple[bool, bytes]:
        """Whether a data connection brings the token (pyzmq's name for it, whose own would log the password)."""
        if domain == _DATA_DOMAIN and hmac.compare_digest(password.encode(), self.data_token.encode()):
            return True, b"OK"
        self._metrics.refused_tokens.inc()
        if not self._has_told:  # once, because strangers cannot be told apart
            self._has_told = True
            logger.warning("refused a data connection without this process's token; further ones are only counted")
        return False, b"wrong token"


def show_token(socket: zmq.Socket[bytes], token: str) -> None:
    """Make ``socket`` a client of a guarded data socket, before it connects."""
    socket.plain_username = _DATA_USER
    socket.plain_password = token.encode()


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
    """The key problem that a monitor's event (one of ``WATCHED_EVENTS``) reports; None if it reports none."""
    kind = parse_monitor_message(event)["event"]
    if kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "it does not let our key in"
    if kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return "it asks for keys, and we have none" if proof is None else "it has no keys, and we have"
    if kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and proof is not None:
        # A server that cannot read us says nothing; a connection that breaks looks the same.
        return "it broke the handshake off: its key is none that we know for its role, or the connection was lost"
    return None


class ClientProof:
    """A client's keys: its own, and those of which the server must have one (the keys of ``server_role``)."""

    def __init__(self, keys: WireKeys, server_role: Role) -> None:
        self._keys = keys
        # One key for each connection: only a try shows which of several keys the server has by now.
        self._server_keys = itertools.cycle(keys.peers[server_role])
        self.num_server_keys = len(keys.peers[server_role])

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Make ``socket`` a client that only talks CURVE, before it connects."""
        socket.curve_serverkey = next(self._server_keys)
        socket.curve_publickey = self._keys.public
        socket.curve_secretkey = self._keys.secret
