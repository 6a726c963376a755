"""The speed of KV blocks from one process into another, verified and sealed, compared with plain pyzmq.

For every way there are two processes on loopback, each with a pool of huge-page memory like the engine's. In every round each way
moves the same bytes once, in rotating order, so that other load on the machine affects all ways. The result is the median of the
ratios within a round, with the lowest and the highest. The sender times a round: from the first block until the receiver reports
that all have arrived.

    frames     pyzmq PUSH/PULL, ``copy=False`` on both sides, in its usual form: the bytes end in ZeroMQ's memory and are dropped
               there, so nobody can use them.
    frames-kept the same, in processes that tell glibc to keep freed memory as kvrelay's workers do
               (:mod:`kvrelay.common.system`): the most that ZeroMQ reaches. All ways below do that, too.
    verified   kvrelay's BlockSender and BlockReceiver with a lease: XXH3 over header and pool memory, granted, committed, verified.
    sealed     the same with AES-256-GCM instead of XXH3.
    shared     kvrelay through shared memory (SharedReceiver), as between workers on one host, with the same lease and verification.
    shared-sealed the same with AES-256-GCM.

In its warm-up round a way must prove that the receiver's pool holds the sender's bytes. Run it in the project's environment:
``python benchmarks/handoff.py --help``.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Pipe
from typing import Any

import psutil
from handoff_parts.pools import Sizes
from handoff_parts.rounds import Round, Way, run_round
from handoff_parts.sides import Side
from handoff_parts.ways import receive, send

from kvrelay.launcher.bench.machine import CpuMeter
from kvrelay.launcher.bench.records import CpuUse

LONGEST_S = 1800.0  # limit for one block size
PLAIN_WAYS = ("frames", "frames-kept")
WAYS = [*PLAIN_WAYS, "verified", "sealed", "shared", "shared-sealed"]


def measure(sizes: Sizes, ways: Sequence[str], num_rounds: int) -> tuple[dict[str, list[Round]], CpuUse | None]:
    """Rounds of every way, taken in turns, without the warm-up rounds; and the CPU use meanwhile."""
    rounds: dict[str, list[Round]] = {}
    with ExitStack() as stack:
        runs: dict[str, Callable[[], Round]] = {}
        for name in ways:
            way, (at_receiver, at_sender) = Way(name), Pipe()
            # Each way has its own processes, because ways differ in settings and heap.
            receiver, sender = (
                stack.enter_context(Side(target, sizes, way, peer, ends_s=time.monotonic() + LONGEST_S))
                for target, peer in ((receive, at_receiver), (send, at_sender))
            )
            at_receiver.close()
            at_sender.close()
            sender.tell(receiver.hear())
            digest = sender.hear()
            runs[name] = functools.partial(run_round, sender, receiver)
            run_round(sender, receiver, None if way.is_plain else digest)
            runs[name]()
        names = list(runs)
        meter = CpuMeter(lambda: [child.pid for child in psutil.Process().children(recursive=True)])
        for number in range(num_rounds):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                rounds.setdefault(name, []).append(runs[name]())
        cpu = meter.use()
    return rounds, cpu


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest. Pure."""
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def summary(sizes: Sizes, rounds: dict[str, list[Round]], cpu: CpuUse | None) -> dict[str, Any]:
    """Medians and ranges of each way, and of the ratios within a round. Pure."""

    def ratio(way: str, base: str) -> dict[str, float] | None:
        if way not in rounds or base not in rounds:
            return None
        pairs = zip(rounds[way], rounds[base], strict=True)
        return spread([other.seconds / mine.seconds for mine, other in pairs])

    gigabytes = sizes.nbytes / 1e9
    compared = [(way, base) for way in ("verified", "sealed", "shared", "shared-sealed") for base in PLAIN_WAYS]
    compared += [("sealed", "verified"), ("shared", "verified"), ("shared-sealed", "shared")]
    ratios = {f"{way} / {base}": ratio(way, base) for way, base in compared}
    return {
        "block_nbytes": sizes.block_nbytes,
        "num_blocks": sizes.num_blocks,
        "others_cores": None if cpu is None else cpu.others,
        "stolen_cores": None if cpu is None else cpu.stolen,
        "ways": {
            way: {
                "gigabytes_per_s": spread([gigabytes / one.seconds for one in many]),
                "sender_cpu_s_per_gigabyte": statistics.median(one.sender_cpu_s for one in many) / gigabytes,
                "receiver_cpu_s_per_gigabyte": statistics.median(one.receiver_cpu_s for one in many) / gigabytes,
                "num_rounds": len(many),
            }
            for way, many in rounds.items()
        },
        "ratios": {name: value for name, value in ratios.items() if value is not None},
    }


def show(result: dict[str, Any]) -> None:
    """Print a summary."""
    kibibytes = result["block_nbytes"] / 1024
    num_rounds = next(iter(result["ways"].values()))["num_rounds"]
    print(f"\nblocks of {kibibytes:.0f} KiB, {result['num_blocks']} per round, {num_rounds} rounds, medians")
    if result["others_cores"] is not None:
        print(
            f"meanwhile others used {result['others_cores']:.2f} cores, the hypervisor took {result['stolen_cores']:.2f}"
        )
    print(f"{'way':<14}{'GB/s (lowest to highest)':>26}{'sender CPU s/GB':>18}{'receiver CPU s/GB':>20}")
    for way, figures in result["ways"].items():
        sender, receiver = figures["sender_cpu_s_per_gigabyte"], figures["receiver_cpu_s_per_gigabyte"]
        print(f"{way:<14}{_ranged(figures['gigabytes_per_s']):>26}{sender:>18.3f}{receiver:>20.3f}")
    for name, found in result["ratios"].items():
        print(f"{name:<26}{_ranged(found)}")


def _ranged(found: dict[str, float]) -> str:
    return f"{found['median']:.2f} ({found['lowest']:.2f} to {found['highest']:.2f})"


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-kib", type=int, nargs="+", default=[360, 2048], help="block sizes in KiB")
    parser.add_argument("--round-mib", type=int, default=384, help="bytes of one round in MiB")
    parser.add_argument("--rounds", type=int, default=9, help="rounds that count, behind two that warm up")
    parser.add_argument("--ways", nargs="+", default=WAYS, help="what is measured")
    options = parser.parse_args()
    for block_kib in options.block_kib:
        sizes = Sizes(block_kib * 1024, max(1, options.round_mib * 1024 // block_kib))
        show(summary(sizes, *measure(sizes, options.ways, options.rounds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
