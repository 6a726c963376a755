"""Where ranks of other hosts connect to their leader, each with two links: one for plans and one for blocks.

A new connection gets some seconds to agree on a seal and to identify itself. If it cannot be a rank of this worker, it is told why
(if it has the secret) and dropped.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time

import msgspec

import kvrelay
from kvrelay.common.errors import ModelError, SettingsError
from kvrelay.engine.ranks.link import Link, sealed_link
from kvrelay.engine.ranks.messages import Hello, Refused
from kvrelay.engine.ranks.nodes import OtherNodes
from kvrelay.engine.ranks.remote import Arrived

logger = logging.getLogger(__name__)

_HELLO_S = 5.0  # time for a connection to identify itself
_NUM_NAMED = 1000  # rejected connections that get a log line
_HELLO_BYTES = 4096
_AT_ONCE = 64  # connections that are not yet identified; more are closed
_BIND_S = 60.0  # time for the leader's own name to resolve to it: names of new pods take a while
_BIND_AGAIN_S = 0.5


class Door:
    """Listens from construction to ``close``."""

    def __init__(self, nodes: OtherNodes) -> None:
        """Raises SettingsError if this machine cannot listen at the address that the others use."""
        self._nodes = nodes
        self._awaited = range(nodes.place.num_local, nodes.place.num_ranks)
        self._halves: dict[int, tuple[Hello, Link[Hello]]] = {}  # by rank: the first of its two links
        self._arrived: dict[int, Arrived] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        self._num_strangers = 0
        self._strangers = threading.BoundedSemaphore(_AT_ONCE)
        self._listening = _listen(*nodes.place.leader)
        self._thread = threading.Thread(target=self._accept, name="ranks-door", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> list[Arrived]:
        """All expected ranks, in order. Raises ModelError naming missing ones if they do not arrive in time."""
        with self._changed:
            if self._changed.wait_for(self._is_complete, timeout_s):
                arrived, self._arrived = self._arrived, {}
                return [arrived[rank] for rank in self._awaited]
            missing = [rank for rank in self._awaited if not self._is_here(rank)]
        host, port = self._nodes.place.leader
        names = ", ".join(f"{rank} (node {rank // self._nodes.place.num_local})" for rank in missing)
        raise ModelError(
            f"after {timeout_s:g} s these ranks have not come to {host}:{port}: {names}. Does the same command run on these nodes, "
            "with the same --nodes, --tensor-parallel, --pipeline-parallel and --keys?"
        )

    def close(self) -> None:
        """Stop listening, and send away ranks that arrived but were not taken."""
        self._is_closed = True
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listening.close()
        with self._changed:
            for arrived in self._arrived.values():
                arrived.close()
            for _, link in self._halves.values():
                _send_away(link)
            self._arrived, self._halves = {}, {}

    def _is_complete(self) -> bool:
        return all(map(self._is_here, self._awaited))

    def _is_here(self, rank: int) -> bool:
        return rank in self._arrived and not self._arrived[rank].is_over

    def _accept(self) -> None:
        while True:
            try:
                stream, (host, *_) = self._listening.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(_BIND_AGAIN_S)  # such as no free descriptors
                continue
            if not self._strangers.acquire(blocking=False):
                stream.close()
                continue
            threading.Thread(target=self._meet, args=(stream, host), daemon=True).start()

    def _meet(self, stream: socket.socket, host: str) -> None:
        limit = threading.Timer(_HELLO_S, _shut, (stream,))  # for the whole identification
        limit.start()
        try:
            link = sealed_link(stream, Hello, self._nodes.secret, calls=False)
            hello: Hello | None = link.receive(max_bytes=_HELLO_BYTES)
            assert hello is not None, "it was waited for"
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            stream.close()
            self._num_strangers += 1
            if self._num_strangers <= _NUM_NAMED:
                logger.warning("a connection from %s is no rank of this worker: %s", host, error)
            return
        finally:
            limit.cancel()
            self._strangers.release()
        with self._changed:
            refused, links = self._take(hello, link)
            self._changed.notify_all()
        if refused is not None:
            logger.warning("rank %d (%s) is refused: %s", hello.rank, hello.place, refused)
            for one in links:
                with contextlib.suppress(OSError):
                    one.send(Refused(refused))
                _send_away(one)

    def _take(self, hello: Hello, link: Link[Hello]) -> tuple[str | None, list[Link[Hello]]]:
        """Call under the lock. Why the link cannot be taken, and the links that this concerns.

        A rank's two links arrive in any order.
        """
        reason = self._why_not(hello)
        if reason is not None:
            return reason, [link]
        half = self._halves.get(hello.rank)
        if half is None or half[0].life != hello.life:
            if half is not None:  # an earlier, failed try
                _send_away(half[1])
            self._halves[hello.rank] = hello, link
            return None, []
        del self._halves[hello.rank]
        plans, blocks = (half[1], link) if hello.carries_blocks else (link, half[1])
        here = self._arrived.get(hello.rank)
        if here is not None and not here.is_over:
            return f"rank {hello.rank} is here already: {here.hello.place}", [plans, blocks]
        if here is not None:
            here.close()
        self._arrived[hello.rank] = Arrived(hello, plans, blocks)
        logger.info("rank %d (%s) is here", hello.rank, hello.place)
        return None, []

    def _why_not(self, hello: Hello) -> str | None:
        if self._is_closed:
            return "its leader has ended, or has its ranks"
        place = self._nodes.place
        theirs = (hello.version, hello.num_ranks, hello.num_nodes)
        if theirs != (kvrelay.__version__, place.num_ranks, place.num_nodes):
            return (
                f"it is kvrelay {hello.version}, of {hello.num_ranks} ranks on {hello.num_nodes} nodes, its leader "
                f"{kvrelay.__version__}, of {place.num_ranks} on {place.num_nodes}"
            )
        if hello.rank not in self._awaited:
            return (
                f"it is not one of ranks {self._awaited.start} to {self._awaited.stop - 1}: is its --node-rank right?"
            )
        return None


def _listen(host: str, port: int) -> socket.socket:
    until_s = time.monotonic() + _BIND_S
    while True:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            return socket.create_server(address[:2], family=family, backlog=_AT_ONCE)
        except OSError as error:
            if time.monotonic() > until_s:
                raise SettingsError(
                    f"--leader-address: node 0 cannot listen on {host}:{port} ({error}); it must lead to this machine"
                ) from error
            time.sleep(_BIND_AGAIN_S)


def _shut(stream: socket.socket) -> None:
    with contextlib.suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)


def _send_away(link: Link[Hello]) -> None:
    link.shut()
    link.close()
