"""How a rank on another host finds its leader, and its line to its host's own process.

The host's process (:mod:`kvrelay.engine.ranks.host`) starts ranks before there is a leader. They look for a leader until there is
one, and end with it. Then they are started again for the next one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

import kvrelay
from kvrelay.common.errors import KvrelayError
from kvrelay.engine.ranks.link import Link, sealed_link
from kvrelay.engine.ranks.messages import ALIVE_S, Alive, FromLeader, Hello, Leave, Refused, ToRank

_CONNECT_S = 5.0
_AGAIN_S = 0.5


class NoLeaderError(KvrelayError):
    """The process at the address is not, or no longer, this rank's leader."""


class Host:
    """The rank's end of the line to its host's process. It sends signs of life, and the rank ends when the host's process ends."""

    def __init__(self, link: Link[Leave]) -> None:
        """Starts both at once."""
        self.leave: Callable[[], None] = lambda: os._exit(0)  # called when the host is asked to end
        self._link = link
        for work in (self._listen, self._beat):
            threading.Thread(target=work, daemon=True).start()

    def send(self, message: Any) -> None:
        """Send, and ignore errors."""
        with contextlib.suppress(OSError):
            self._link.send(message)

    def _listen(self) -> None:
        with contextlib.suppress(EOFError):
            while self._link.receive() is not None:
                with contextlib.suppress(OSError):  # the leader is gone, and the process about to end
                    self.leave()
        os._exit(1)

    def _beat(self) -> None:
        while True:
            self.send(Alive(0))
            time.sleep(ALIVE_S)


def find_leader(environment: Mapping[str, str], secret: bytes) -> tuple[Link[ToRank], Link[Any], dict[str, str]]:
    """Links for plans and for blocks, and torchrun's variables for the meeting. Waits until there is a leader.

    ``environment``: see NodePlace. Raises NoLeaderError.
    """
    hello = Hello(
        int(environment["RANK"]), int(environment["WORLD_SIZE"]), int(environment["GROUP_WORLD_SIZE"]), kvrelay.__version__,
        secrets.token_hex(16), f"process {os.getpid()} of {socket.gethostname()}", carries_blocks=False,
    )  # fmt: skip
    address = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    plans = _call(address, secret, hello)
    blocks = _call(address, secret, msgspec.structs.replace(hello, carries_blocks=True))
    try:
        while (told := plans.receive(_AGAIN_S)) is None:  # ranks of other hosts have not arrived yet
            plans.send(Alive(0))  # fails if the leader's host is gone
            if blocks.is_over(0):
                raise EOFError("the link for blocks is over")
    except (EOFError, OSError) as error:
        raise NoLeaderError(f"the leader at {address[0]}:{address[1]} has hung up: {error}; see its log") from error
    if isinstance(told, Refused):
        raise NoLeaderError(f"the leader at {address[0]}:{address[1]} refuses rank {hello.rank}: {told.reason}")
    return plans.then(ToRank), blocks, {"MASTER_ADDR": plans.other_host, "MASTER_PORT": str(told.master_port)}


def _call(address: tuple[str, int], secret: bytes, hello: Hello) -> Link[FromLeader]:
    while True:
        try:
            stream = socket.create_connection(address, _CONNECT_S)
        except OSError:  # no leader is listening, or the name does not resolve yet
            time.sleep(_AGAIN_S)
            continue
        try:
            link: Link[FromLeader] = sealed_link(stream, FromLeader, secret, calls=True)
            link.send(hello)
            return link
        except (OSError, EOFError) as error:
            stream.close()
            raise NoLeaderError(f"what listens at {address[0]}:{address[1]} is no leader: {error}") from error
