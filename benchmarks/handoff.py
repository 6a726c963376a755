"""How fast KV blocks go from one process into another, verified and sealed, beside plain pyzmq and NIXL over tcp.

For every way two processes on loopback, each with a pool of huge-page memory like the engine's. In every round each way moves
the same bytes once, in an order that turns from round to round, so that a neighbour's load falls on all of them; what is
compared is the ratio *within* a round, and the median of those ratios is what counts. A round is timed by the sender: first
block given away until the receiver's message that everything is there.

    frames     pyzmq PUSH/PULL, ``copy=False`` on both sides: the bytes end in ZeroMQ's memory and are thrown away, untouched.
               Nobody can use them there; this is the most that ZeroMQ gives.
    landed     the same, and every frame is copied into the receiver's pool: the same bytes in a place that was chosen. No check.
    verified   kvrelay's BlockSender and BlockReceiver with a lease: XXH3 over header and pool memory, granted, committed, verified.
    sealed     the same with AES-256-GCM instead of XXH3.
    nixl       NIXL WRITE over UCX tcp, pool to pool, no check (``--nixl-python``: an interpreter that has ``nixl``).

Before it counts, a way must prove in its warm-up round that the receiver's pool holds the sender's bytes. Run it with the
project's environment: ``python benchmarks/handoff.py --help``.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import queue
import secrets
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import xxhash
import zmq
from prometheus_client import CollectorRegistry

from kvrelay.common.block_hash import chain_hashes, root_hash
from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.wire.codec import Codec
from kvrelay.wire.data_plane import BlockReceiver, BlockSender
from kvrelay.wire.leases import LeaseSettings, LeaseTable, VerifiedLease
from kvrelay.wire.messages import Commit, FailureCode, Grant, Message, Offer, Timings, Verified
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.transfers import DecodeLink, TransferSettings, TransferTable

BLOCK_SIZE = 16  # tokens
FINGERPRINT = b"handoff benchmark"
EPOCH = 1
HEADER = bytes(64)  # what plain pyzmq sends in front of a block
ANSWER_S = 60.0  # a side that says nothing for so long has failed
NIXL_SCRIPT = Path(__file__).with_name("handoff_nixl.py")


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is moved in a round."""

    block_nbytes: int
    num_blocks: int

    @property
    def nbytes(self) -> int:
        """Bytes of a round."""
        return self.block_nbytes * self.num_blocks


@dataclass(frozen=True, slots=True)
class Round:
    """One way's figures in one round."""

    seconds: float
    sender_cpu_s: float
    receiver_cpu_s: float


class Pool:
    """A pool's bytes, as tables on both sides see them."""

    def __init__(self, sizes: Sizes) -> None:
        self.block_nbytes = sizes.block_nbytes
        memory = mmap.mmap(-1, sizes.nbytes)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = memoryview(memory)
        self.bytes[:] = bytes(sizes.nbytes)  # faulted in before anything is timed

    def open_read(self, block_id: int) -> memoryview:
        """The block's bytes."""
        return self.bytes[block_id * self.block_nbytes : (block_id + 1) * self.block_nbytes]

    def close_read(self, block_id: int) -> None:
        """Nothing to do in host memory."""

    def open_write(self, block_id: int) -> memoryview:
        """The block's bytes."""
        return self.open_read(block_id)

    def close_write(self, block_id: int) -> None:
        """Nothing to do in host memory."""

    def digest(self) -> str:
        """Of all bytes."""
        return xxhash.xxh3_128_hexdigest(self.bytes)


class WholePool:
    """Reservations that give every lease the whole pool: one hand-off at a time, nothing cached."""

    def __init__(self, num_blocks: int) -> None:
        self._block_ids = list(range(num_blocks))

    def reserve(self, lease_key: str, num_blocks: int, hashes: Sequence[bytes]) -> tuple[list[int], int]:
        """The whole pool."""
        return self._block_ids, 0

    def release(self, lease_key: str) -> None:
        """Nothing to do."""

    def publish(self, lease_key: str, index: int, block_hash: bytes) -> None:
        """Nothing to do."""


# -- the receiving process ---------------------------------------------------------------------------------------------


class LeaseEnds:
    """Tells the main thread how a lease ended."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[VerifiedLease | str] = queue.SimpleQueue()

    def on_lease_verified(self, lease: VerifiedLease) -> None:
        """Every block proved right."""
        self.queue.put(lease)

    def on_lease_rejected(
        self, lease_id: int, peer_id: str, key: tuple[str, int], code: FailureCode, detail: str
    ) -> None:
        """Never in a benchmark."""
        self.queue.put(f"{code}: {detail}")


class KvrelayReceiver:
    """Leases and a block receiver; plain or sealed."""

    def __init__(self, pool: Pool, sizes: Sizes, peer: Connection, *, seals_kv: bool) -> None:
        self._ends, self._peer, self._codec = LeaseEnds(), peer, Codec()
        settings = LeaseSettings(EPOCH, FINGERPRINT, BLOCK_SIZE, ttl_s=ANSWER_S, seals_kv=seals_kv)
        metrics = WireMetrics(CollectorRegistry())
        # One block more than is sent: a lease has room for the first token behind the prompt.
        self._leases = LeaseTable(settings, WholePool(sizes.num_blocks + 1), pool, self._ends, metrics, time.monotonic)
        self._receiver = BlockReceiver("tcp://127.0.0.1:0", self._leases, sizes.block_nbytes, context=zmq.Context())
        self._receiver.start()
        self.address = self._receiver.address

    def run(self) -> None:
        """One hand-off."""
        offer = self._codec.decode(self._peer.recv_bytes())
        assert isinstance(offer, Offer)
        self._peer.send_bytes(self._codec.encode(self._leases.offer("sender", offer)))
        commit = self._codec.decode(self._peer.recv_bytes())
        assert isinstance(commit, Commit)
        self._leases.commit("sender", commit)
        lease = self._ends.queue.get(timeout=ANSWER_S)
        if isinstance(lease, str):
            raise RuntimeError(f"the hand-off was rejected: {lease}")
        self._peer.send_bytes(self._codec.encode(Verified(lease_id=lease.lease_id, epoch=EPOCH)))

    def close(self) -> None:
        """End the thread."""
        self._receiver.stop()


class ZmqReceiver:
    """A PULL socket; frames are thrown away, or copied into the pool."""

    def __init__(self, pool: Pool, sizes: Sizes, peer: Connection, *, lands: bool) -> None:
        self._pool, self._sizes, self._peer, self._lands = pool, sizes, peer, lands
        self._socket = zmq.Context().socket(zmq.PULL)
        self._socket.bind("tcp://127.0.0.1:0")
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def run(self) -> None:
        """All blocks of a round."""
        for index in range(self._sizes.num_blocks):
            self._socket.recv()
            frame = self._socket.recv(copy=False)
            if self._lands:
                self._pool.open_write(index)[:] = frame.buffer
        self._peer.send_bytes(b"")

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(linger=0)


def receive(sizes: Sizes, way: str, parent: Connection, peer: Connection) -> None:
    """The receiving process: a round for every word of the parent, until it says nothing."""
    pool = Pool(sizes)
    makers: dict[str, Callable[[], KvrelayReceiver | ZmqReceiver]] = {
        "frames": lambda: ZmqReceiver(pool, sizes, peer, lands=False),
        "landed": lambda: ZmqReceiver(pool, sizes, peer, lands=True),
        "verified": lambda: KvrelayReceiver(pool, sizes, peer, seals_kv=False),
        "sealed": lambda: KvrelayReceiver(pool, sizes, peer, seals_kv=True),
    }
    receiver = makers[way]()
    parent.send(receiver.address)
    while (is_checked := parent.recv()) is not None:
        if is_checked:
            pool.bytes[:] = bytes(sizes.nbytes)
        parent.send(None)  # ready
        cpu_s = time.process_time()
        receiver.run()
        cpu_s = time.process_time() - cpu_s
        parent.send((cpu_s, pool.digest() if is_checked else None))
    receiver.close()


# -- the sending process -----------------------------------------------------------------------------------------------


class TransferEnds:
    """Hears how transfers end."""

    def on_verified(self, key: tuple[str, int]) -> None:
        """The sender has read the message itself."""

    def on_failed(self, key: tuple[str, int], code: FailureCode, detail: str, retry_after_s: float | None) -> None:
        """Never in a benchmark."""
        raise RuntimeError(f"the transfer failed: {code}: {detail}")

    def on_blocks_released(self, key: tuple[str, int]) -> None:
        """The pool is the next round's."""


class PipeControl:
    """The control link: a pipe to the receiving process."""

    def __init__(self, peer: Connection) -> None:
        self._peer, self._codec = peer, Codec()

    def send(self, message: Message) -> bool:
        """Send a message."""
        self._peer.send_bytes(self._codec.encode(message))
        return True

    def recv(self) -> Message:
        """Wait for a message."""
        return self._codec.decode(self._peer.recv_bytes())


class KvrelaySender:
    """A transfer table and a block sender; plain or sealed."""

    def __init__(self, pool: Pool, sizes: Sizes, peer: Connection, address: str, *, seals_kv: bool) -> None:
        self._sizes, self._control = sizes, PipeControl(peer)
        metrics = WireMetrics(CollectorRegistry())
        self._sender = BlockSender(address, metrics=metrics, context=zmq.Context())
        self._link = DecodeLink(self._control, self._sender, seals_kv)
        self._transfers = TransferTable(pool, TransferEnds(), TransferSettings(), metrics, time.monotonic)
        self._num_rounds = 0

    def run(self) -> float:
        """One hand-off, timed from the moment at which all blocks are ready."""
        self._num_rounds += 1
        key = ("r", self._num_rounds)
        tokens = [1] * (self._sizes.num_blocks * BLOCK_SIZE)
        offer = Offer(
            request_id=key[0],
            attempt=key[1],
            gateway_id="gateway",
            fingerprint=FINGERPRINT,
            token_ids=tokens,
            num_prompt_tokens=len(tokens),
            sampling=SamplingParams(max_tokens=2),
            block_hashes=chain_hashes(root_hash(FINGERPRINT), tokens, BLOCK_SIZE),
        )
        self._transfers.open(key, self._link, offer, list(range(self._sizes.num_blocks)))
        grant = self._control.recv()
        assert isinstance(grant, Grant), grant
        self._transfers.on_message(self._link, grant)
        started_s = time.perf_counter()
        self._transfers.blocks_ready(key, self._sizes.num_blocks)
        self._transfers.commit(key, SampledToken(1), 0, Timings())
        verified = self._control.recv()
        seconds = time.perf_counter() - started_s
        assert isinstance(verified, Verified), verified
        self._transfers.on_message(self._link, verified)
        self._transfers.tick()
        return seconds

    def close(self) -> None:
        """End the thread."""
        self._sender.close()


class ZmqSender:
    """A PUSH socket."""

    def __init__(self, pool: Pool, sizes: Sizes, peer: Connection, address: str) -> None:
        self._pool, self._sizes, self._peer = pool, sizes, peer
        self._socket = zmq.Context().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.connect(address)

    def run(self) -> float:
        """All blocks of a round."""
        started_s = time.perf_counter()
        for index in range(self._sizes.num_blocks):
            self._socket.send(HEADER, zmq.SNDMORE)
            self._socket.send(self._pool.open_read(index), copy=False)
        self._peer.recv_bytes()
        return time.perf_counter() - started_s

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(linger=0)


def send(sizes: Sizes, way: str, parent: Connection, peer: Connection) -> None:
    """The sending process: a round for every word of the parent, until it says nothing."""
    pool = Pool(sizes)
    block = secrets.token_bytes(sizes.block_nbytes)
    for index in range(sizes.num_blocks):
        pool.open_write(index)[:] = block
        pool.open_write(index)[:8] = index.to_bytes(8, "little")
    address: str = parent.recv()
    makers: dict[str, Callable[[], KvrelaySender | ZmqSender]] = {
        "frames": lambda: ZmqSender(pool, sizes, peer, address),
        "landed": lambda: ZmqSender(pool, sizes, peer, address),
        "verified": lambda: KvrelaySender(pool, sizes, peer, address, seals_kv=False),
        "sealed": lambda: KvrelaySender(pool, sizes, peer, address, seals_kv=True),
    }
    sender = makers[way]()
    parent.send(pool.digest())
    while parent.recv() is not None:
        cpu_s = time.process_time()
        seconds = sender.run()
        parent.send((seconds, time.process_time() - cpu_s))
    sender.close()


# -- the parent --------------------------------------------------------------------------------------------------------


class Pair:
    """Both processes of one way, as the parent sees them. No way shares a process, and so settings and heap, with another."""

    def __init__(self, sizes: Sizes, way: str) -> None:
        self._way = way
        context = multiprocessing.get_context("spawn")
        peer_of_receiver, peer_of_sender = context.Pipe()
        self._receiver, receiver_end = context.Pipe()
        self._sender, sender_end = context.Pipe()
        self._processes = [
            context.Process(target=receive, args=(sizes, way, receiver_end, peer_of_receiver), daemon=True),
            context.Process(target=send, args=(sizes, way, sender_end, peer_of_sender), daemon=True),
        ]
        for process in self._processes:
            process.start()
        self._sender.send(self._answer(self._receiver))
        self._digest = self._answer(self._sender)

    def run(self, is_checked: bool) -> Round:
        """One round. Raises RuntimeError if the bytes that came are not those that were sent."""
        self._receiver.send(is_checked)
        self._answer(self._receiver)
        self._sender.send("run")
        receiver_cpu_s, digest = self._answer(self._receiver)
        seconds, sender_cpu_s = self._answer(self._sender)
        if is_checked and self._way != "frames" and digest != self._digest:
            raise RuntimeError(f"{self._way}: the receiver's pool does not hold what was sent")
        return Round(seconds, sender_cpu_s, receiver_cpu_s)

    def close(self) -> None:
        """End both processes."""
        for connection, process in zip((self._receiver, self._sender), self._processes, strict=True):
            if process.is_alive():
                connection.send(None)
            process.join(ANSWER_S)
            if process.is_alive():
                process.kill()

    def _answer(self, connection: Connection) -> Any:
        deadline_s = time.monotonic() + ANSWER_S
        while not connection.poll(0.2):
            if time.monotonic() > deadline_s or not all(process.is_alive() for process in self._processes):
                raise RuntimeError(f"a side failed, or said nothing for {ANSWER_S:.0f} s; its trace is above")
        return connection.recv()


class NixlPair:
    """Both NIXL processes, started by the interpreter that has NIXL; one line of JSON asks, one answers.

    They are stopped between their rounds: NIXL's progress threads poll, and would take the cores from the other ways.
    """

    def __init__(self, python: str, sizes: Sizes) -> None:
        environment = {**os.environ, "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo", "NIXL_LOG_LEVEL": "ERROR"}
        self._process = subprocess.Popen(
            [python, str(NIXL_SCRIPT), str(sizes.block_nbytes), str(sizes.num_blocks)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            process_group=0,
        )

    def run(self, is_checked: bool) -> Round:
        """One round. Raises RuntimeError if it fails."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        os.killpg(self._process.pid, signal.SIGCONT)
        self._process.stdin.write(json.dumps({"is_checked": is_checked}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("NIXL failed; its trace is above")
        os.killpg(self._process.pid, signal.SIGSTOP)
        return Round(**json.loads(line))

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(ProcessLookupError):  # it has failed
            os.killpg(self._process.pid, signal.SIGCONT)
        self._process.stdin.close()
        try:
            self._process.wait(ANSWER_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()


def measure(sizes: Sizes, ways: Sequence[str], num_rounds: int, nixl_python: str | None) -> dict[str, list[Round]]:
    """Rounds of every way, taken in turn; the warm-up rounds are not among them."""
    rounds: dict[str, list[Round]] = {}
    with ExitStack() as stack:
        runs: dict[str, Callable[[bool], Round]] = {}
        for way in ways:
            pair = Pair(sizes, way)
            stack.callback(pair.close)
            runs[way] = pair.run
        if nixl_python is not None:
            nixl = NixlPair(nixl_python, sizes)
            stack.callback(nixl.close)
            runs["nixl"] = nixl.run
        for run in runs.values():
            run(True)
            run(False)
        names = list(runs)
        for number in range(num_rounds):
            shift = number % len(names)
            for way in names[shift:] + names[:shift]:
                rounds.setdefault(way, []).append(runs[way](False))
    return rounds


def summary(sizes: Sizes, rounds: dict[str, list[Round]]) -> dict[str, Any]:
    """Medians per way, and medians of the ratios within a round."""

    def ratio(way: str, base: str) -> float | None:
        if way not in rounds or base not in rounds:
            return None
        pairs = zip(rounds[way], rounds[base], strict=True)
        return statistics.median(other.seconds / mine.seconds for mine, other in pairs)

    gigabytes = sizes.nbytes / 1e9
    ratios = {
        "verified / frames": ratio("verified", "frames"),
        "verified / landed": ratio("verified", "landed"),
        "sealed / verified": ratio("sealed", "verified"),
        "verified / nixl": ratio("verified", "nixl"),
        "sealed / nixl": ratio("sealed", "nixl"),
    }
    return {
        "block_nbytes": sizes.block_nbytes,
        "num_blocks": sizes.num_blocks,
        "ways": {
            way: {
                "gigabytes_per_s": statistics.median(gigabytes / one.seconds for one in many),
                "sender_cpu_s_per_gigabyte": statistics.median(one.sender_cpu_s for one in many) / gigabytes,
                "receiver_cpu_s_per_gigabyte": statistics.median(one.receiver_cpu_s for one in many) / gigabytes,
                "rounds": [asdict(one) for one in many],
            }
            for way, many in rounds.items()
        },
        "ratios": {name: value for name, value in ratios.items() if value is not None},
    }


def show(result: dict[str, Any]) -> None:
    """Print a summary."""
    kibibytes = result["block_nbytes"] / 1024
    num_rounds = len(next(iter(result["ways"].values()))["rounds"])
    print(f"\nblocks of {kibibytes:.0f} KiB, {result['num_blocks']} per round, {num_rounds} rounds, medians")
    print(f"{'way':<10}{'GB/s':>8}{'sender CPU s/GB':>18}{'receiver CPU s/GB':>20}")
    for way, figures in result["ways"].items():
        sender, receiver = figures["sender_cpu_s_per_gigabyte"], figures["receiver_cpu_s_per_gigabyte"]
        print(f"{way:<10}{figures['gigabytes_per_s']:>8.2f}{sender:>18.3f}{receiver:>20.3f}")
    for name, value in result["ratios"].items():
        print(f"{name:<20}{value:>6.2f}")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-kib", type=int, nargs="+", default=[360, 2048], help="block sizes in KiB")
    parser.add_argument("--round-mib", type=int, default=384, help="bytes of one round in MiB")
    parser.add_argument("--rounds", type=int, default=9, help="rounds that count, behind two that warm up")
    parser.add_argument(
        "--ways", nargs="+", default=["frames", "landed", "verified", "sealed"], help="what is measured"
    )
    parser.add_argument("--nixl-python", help="interpreter of an environment that has nixl, torch and numpy")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    for block_kib in options.block_kib:
        sizes = Sizes(block_kib * 1024, max(1, options.round_mib * 1024 // block_kib))
        results.append(summary(sizes, measure(sizes, options.ways, options.rounds, options.nixl_python)))
        show(results[-1])
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
