"""What keys cost a control message: round trips of a DEALER and a ROUTER in two processes, with CURVE and without, in turns.

What is compared is the ratio within a round; the median of those ratios counts. The messages are of the size of a few tokens, of
a prompt of 300, and of one of 30,000. Run it with the project's environment: ``python benchmarks/control_link.py``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from multiprocessing.connection import Connection

import zmq
from handoff_ways import CURVE_KEYS

WAYS = ("plain", "curve")


def echo(way: str, parent: Connection) -> None:
    """Send back what comes, until an empty message does."""
    router = zmq.Context().socket(zmq.ROUTER)
    if way == "curve":
        router.curve_server = True
        router.curve_secretkey = CURVE_KEYS[1]
    router.bind("tcp://127.0.0.1:0")
    parent.send(router.getsockopt_string(zmq.LAST_ENDPOINT))
    while (frames := router.recv_multipart())[1]:
        router.send_multipart(frames)
    router.close(linger=0)


def connected(way: str, address: str) -> zmq.Socket[bytes]:
    """A DEALER to an echo."""
    dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    if way == "curve":
        dealer.curve_serverkey = CURVE_KEYS[0]
        dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
    dealer.connect(address)
    return dealer


def round_trip_us(dealer: zmq.Socket[bytes], message: bytes, count: int) -> float:
    """Microseconds of a round trip, the mean of ``count``."""
    begun_s = time.perf_counter()
    for _ in range(count):
        dealer.send(message)
        dealer.recv()
    return 1e6 * (time.perf_counter() - begun_s) / count


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--count", type=int, default=500, help="round trips of one way in a round")
    parser.add_argument("--bytes", type=int, nargs="+", default=[100, 1_000, 100_000], help="sizes of messages")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    dealers: dict[str, zmq.Socket[bytes]] = {}
    processes = []
    for way in WAYS:
        mine, theirs = context.Pipe()
        process = context.Process(target=echo, args=(way, theirs), daemon=True)
        process.start()
        processes.append(process)
        dealers[way] = connected(way, mine.recv())
    for nbytes in options.bytes:
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(options.rounds + 1):
            for way in WAYS if number % 2 else reversed(WAYS):
                value = round_trip_us(dealers[way], bytes(nbytes), options.count)
                if number:  # the first round warms up
                    times[way].append(value)
        ratio = statistics.median(curve / plain for plain, curve in zip(times["plain"], times["curve"], strict=True))
        medians = ", ".join(f"{way} {statistics.median(times[way]):.0f} us" for way in WAYS)
        print(f"{nbytes:>7} bytes: round trip {medians}; curve / plain {ratio:.2f}")
    for dealer in dealers.values():
        dealer.send(b"")
    for process in processes:
        process.join(10)
    for dealer in dealers.values():
        dealer.close(linger=0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
