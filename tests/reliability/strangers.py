"""Strangers at the ports of real workers: they get no answer, cost a bounded amount, and do not disturb an honest client.

Each stranger visits every port (control of both workers, data of the decode worker), with keys and without. Meanwhile an honest
client sends requests through the gateway and checks every token.

    no key            a ZeroMQ peer without keys that says Hello, and sends a block
    wrong key         CURVE with its own keys; on the data port PLAIN with its own token
    garbage           bytes from a seed, on the bare connection
    half greeting     a part of ZMTP's first 64 bytes, then silence
    half frame        a whole greeting, then a part of a frame, then silence
    huge frame        a frame or a command that announces 2 GiB to 2^64 - 1 bytes
    endless message   parts of a message that never ends (only with keys, because libzmq has no bound on parts without them)
    crowd             thousands of silent connections at a time

There are bounds on resident memory, log lines and the honest client's latency. Afterwards the workers have as many descriptors as
before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import os
import random
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from kvrelay.common.block_digests import digests_of
from kvrelay.wire.blocks.frames import BlockHeader
from kvrelay.wire.codec import Codec
from kvrelay.wire.messages import Cancel, Hello, Role
from kvrelay.wire.security.keys import WireKeys, make_keys

from . import zmtp
from .doors import MAX_CONNECTION_MIB, MAX_GROWTH_MIB, TURNED_AWAY_S, Door, crowd, doors_of, exhaust
from .figures import all_descriptors, run_all, wait_until
from .fleet import Fleet, Member
from .neighbour import Neighbour, neighbour_of, small_fleet

MAX_LATENCY_S = 5.0
MAX_LOG_LINES = 60  # of a worker, for all that a single test does to it
_OWN_DESCRIPTORS = 500  # of this process, for everything but strangers


Stranger = Callable[[Door, random.Random], None]


def no_key(door: Door, rng: random.Random) -> None:
    """A peer without keys sends well-formed messages and a block. With keys in use it must get no answer."""
    peer_id = f"stranger-{rng.randrange(10**6)}"
    with zmq.Context() as context, _peer(context) as dealer:
        dealer.setsockopt(zmq.ROUTING_ID, peer_id.encode())
        dealer.connect(door.address)
        _say_everything(dealer)
        if door.keys is not None:
            assert not dealer.poll(500), f"a stranger without keys got {dealer.recv_multipart()}"


def wrong_key(door: Door, rng: random.Random) -> None:
    """A peer has keys or a token, but wrong ones. It must be counted, and get no answer."""
    assert door.keys is not None
    counter = "kvrelay_refused_tokens_total" if door.name == "data" else "kvrelay_refused_keys_total"
    before = door.worker.counted(counter)
    with tempfile.TemporaryDirectory() as scratch, zmq.Context() as context, _peer(context) as dealer:
        if door.name == "data":
            dealer.plain_username, dealer.plain_password = b"prefill", rng.randbytes(32).hex().encode()
        else:
            make_keys(Path(scratch) / "own")
            own = WireKeys.load(Path(scratch) / "own", Role.GATEWAY)
            role = Role.PREFILL if door.worker.role == "prefill" else Role.DECODE
            dealer.curve_serverkey = WireKeys.load(door.keys, Role.GATEWAY).peers[role][0]
            dealer.curve_publickey, dealer.curve_secretkey = own.public, own.secret
        dealer.connect(door.address)
        _say_everything(dealer)
        wait_until(lambda: door.worker.counted(counter) > before, TURNED_AWAY_S, f"{counter} counts")
        assert not dealer.poll(100), f"a stranger with a wrong key got {dealer.recv_multipart()}"


def garbage(door: Door, rng: random.Random) -> None:
    """Random bytes, also after a valid greeting."""
    for number in range(30):
        with door.knock() as connection, contextlib.suppress(OSError):  # the worker may close the connection
            connection.sendall((b"", zmtp.SIGNATURE, zmtp.greeting(), zmtp.greeting() + zmtp.ready())[number % 4])
            connection.sendall(rng.randbytes(rng.randrange(1, 200_000)))


def half_greeting(door: Door, rng: random.Random) -> None:
    """A part of the greeting, then silence. The worker must close the connection."""
    connections = [door.knock() for _ in range(20)]
    for connection in connections:
        connection.sendall(zmtp.greeting(b"CURVE")[: rng.randrange(1, 64)])
    _all_hung_up_on(connections)


def half_frame(door: Door, rng: random.Random) -> None:
    """A valid greeting, then a part of a frame. With keys in use the worker must close the connection."""
    connections = [door.knock() for _ in range(20)]
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.sendall(
                zmtp.greeting() + zmtp.ready() + zmtp.frame(rng.randbytes(1000))[: rng.randrange(1, 900)]
            )
    if door.keys is not None:
        _all_hung_up_on(connections)
    for connection in connections:
        connection.close()


def huge_frame(door: Door, rng: random.Random) -> None:
    """A frame or a command that announces more bytes than there is memory. The worker must close the connection."""
    connections: list[socket.socket] = []
    for nbytes in (2**31, 2**31 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1):
        for is_command in (False, True):
            connections.append(door.knock())
            head = zmtp.frame_head(nbytes, is_command=is_command)
            with contextlib.suppress(OSError):
                # A frame comes after the handshake, a command within it.
                connections[-1].sendall(zmtp.greeting() + (b"" if is_command else zmtp.ready()) + head + bytes(100_000))
    _all_hung_up_on(connections)


def endless_message(door: Door, rng: random.Random) -> None:
    """Up to half a gigabyte of parts of one message, each within the size limit. The worker must close the connection."""
    part = zmtp.frame(rng.randbytes(60_000), has_more=True) * 16
    with door.knock() as connection, contextlib.suppress(OSError):
        connection.sendall(zmtp.greeting() + zmtp.ready())
        for _ in range(512):
            connection.sendall(part)
        raise AssertionError("half a gigabyte of one message was taken from a stranger")


def _peer(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    return dealer


def _say_everything(dealer: zmq.Socket[bytes]) -> None:
    codec = Codec()
    hello = codec.encode(Hello(role=Role.GATEWAY, peer_id=""))  # without a name no peer is welcome
    header = BlockHeader(lease_id=1, epoch=1, block_index=0, payload_nbytes=512, block_hash=bytes(16))
    for frames in (
        [hello],
        [codec.encode(Cancel(request_id="honest-1", attempt=1))],
        [b"\x00"],
        [header.pack(digests_of(memoryview(bytes(512)))), bytes(512)],
        [b"", b"", b""],
    ):
        with contextlib.suppress(zmq.Again):  # the connection may be refused already
            dealer.send_multipart(frames, zmq.DONTWAIT)
    dealer.poll(100)


def _all_hung_up_on(connections: list[socket.socket]) -> None:
    deadline_s = time.monotonic() + TURNED_AWAY_S
    for connection in connections:
        with connection:
            connection.settimeout(max(0.01, deadline_s - time.monotonic()))
            try:
                while connection.recv(4096):
                    pass
            except TimeoutError:
                raise AssertionError(f"a stranger was still connected after {TURNED_AWAY_S} s") from None
            except OSError:  # the worker reset the connection with data unread
                pass


STRANGERS: dict[str, Stranger] = {
    "no key": no_key,
    "wrong key": wrong_key,
    "garbage": garbage,
    "half greeting": half_greeting,
    "half frame": half_frame,
    "huge frame": huge_frame,
    "endless message": endless_message,
}
NEED_KEYS = ("wrong key", "endless message")


async def visit(
    up: Fleet, neighbour: Neighbour, seed: int, num_connections: int, doors: list[Door], crowded: list[Door]
) -> str:
    """Send every stranger to all ``doors`` at the same time, then a crowd to each of ``crowded``. Returns the figures.

    Raises AssertionError at the first bound that does not hold.
    """
    before = {worker.name: (worker.figures(), _told(worker)) for worker in up.workers}
    visits = [
        functools.partial(stranger, door, random.Random(f"{seed} {name} {door.name}"))
        for door in doors
        for name, stranger in STRANGERS.items()
        if name not in NEED_KEYS or door.keys is not None
    ]
    await neighbour.beside(visits)
    told: list[str] = []
    for door in crowded:
        (figures,) = await neighbour.beside([functools.partial(crowd, door, num_connections)])
        told.append(f"{door.worker.role} {door.name}: {figures}")
    for worker in up.workers:
        at_first, num_lines = before[worker.name]
        is_back = functools.partial(_holds_at_most, worker, at_first.num_descriptors)
        what = f"the {worker.role} worker's descriptors are {at_first.num_descriptors} again"
        await asyncio.to_thread(wait_until, is_back, TURNED_AWAY_S, what)
        now = worker.figures()
        allowed_mib = MAX_GROWTH_MIB + num_connections * MAX_CONNECTION_MIB  # the allocator keeps freed memory
        growth_mib = now.rss_mib - at_first.rss_mib
        assert growth_mib < allowed_mib, f"the {worker.role} worker grew by {growth_mib:.0f} MiB"
        num_new = _told(worker) - num_lines
        assert num_new <= MAX_LOG_LINES, f"{num_new} log lines: {worker.log.read_text()[-1000:]}"
        told.append(
            f"{worker.role}: {at_first.num_descriptors} descriptors before, {now.num_descriptors} after, "
            f"{at_first.rss_mib:.0f} MiB before, {now.rss_mib:.0f} after, {num_new} log lines"
        )
    if doors[0].keys is not None:
        decode = up.members["decode-0"]
        assert decode.counted("kvrelay_refused_kv_blocks_total") == 0, "a stranger's frame came to the lease table"
        assert decode.counted("kvrelay_refused_messages_total") == 0, "a stranger's frame came to the control server"
    longest_s = max(neighbour.latencies_s)
    assert longest_s < MAX_LATENCY_S, f"an honest answer took {longest_s:.1f} s"
    return "; ".join([*told, neighbour.told()])


async def visit_workers(
    directory: Path, keys: Path | None, seed: int, num_connections: int, num_too_many: int = 300
) -> str:
    """Start workers and a neighbour, and send all strangers to them."""
    async with small_fleet(directory, keys=keys) as up:
        doors = doors_of(up, keys)
        async with neighbour_of(up) as neighbour:
            figures = await visit(up, neighbour, seed, num_connections, doors, doors)
            exhausted = [functools.partial(exhaust, door, num_too_many) for door in doors[:2]]
            told = [f"{figure}; " for visiting in exhausted for figure in await neighbour.beside([visiting])]
        async with neighbour_of(up):  # after the crowd an honest client is served
            return "".join(told) + figures


def _holds_at_most(worker: Member, descriptors: int) -> bool:
    return worker.figures().num_descriptors <= descriptors


def _told(worker: Member) -> int:
    """The number of a worker's log lines, without debug lines."""
    return sum(" DEBUG " not in line for line in worker.log.read_text(errors="replace").splitlines())


def main() -> int:
    """See the module. Prints one line for workers with keys and one for workers without."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=struct.unpack("<I", os.urandom(4))[0])
    parser.add_argument("--connections", type=int, default=10_000)
    given = parser.parse_args()
    num_connections = min(given.connections, all_descriptors() - _OWN_DESCRIPTORS)
    sys.stdout.write(f"strangers: seed {given.seed}, {num_connections} connections at once\n")

    def run(with_keys: bool) -> str:
        with tempfile.TemporaryDirectory() as directory:
            keys = Path(directory) / "keys" if with_keys else None
            if keys is not None:
                make_keys(keys)
            return asyncio.run(visit_workers(Path(directory), keys, given.seed, num_connections))

    return run_all([("with keys", lambda: run(True)), ("without keys", lambda: run(False))])


if __name__ == "__main__":
    sys.exit(main())
