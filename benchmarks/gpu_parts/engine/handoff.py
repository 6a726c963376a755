"""A hand-off of a long prompt's KV between two processes on one device, from pool to pool, verified, by each way.

Over TCP, and sealed, a block goes from the device to pinned memory, through a socket or shared memory, to pinned memory and the
device. Plain blocks of one host are copied by the device into shared memory and out of it. The device hashes all plain blocks.
Leases, transfers and both ends are kvrelay's, as in :mod:`handoff_parts.ways`.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe
from typing import cast

import torch
import xxhash
from handoff_parts.pools import Pool
from handoff_parts.pools import Sizes as RoundSizes
from handoff_parts.rounds import Way, receive_rounds, run_round, send_rounds
from handoff_parts.sides import Side, heard
from handoff_parts.ways import KvrelayReceiver, KvrelaySender

from gpu_parts.frame.rows import Against, Goal, Row, Unit
from gpu_parts.frame.running import PRELOADED, Context, Fact, Finding
from gpu_parts.frame.sizes import BLOCK_SIZE
from kvrelay.common.system import keep_freed_memory
from kvrelay.engine.config.model import parse_config
from kvrelay.engine.kv.device.copies import CudaCopies, StagingPlan
from kvrelay.engine.kv.geometry import geometry_of
from kvrelay.engine.kv.pool import KvPool

TCP, SAME_HOST, SEALED = "verified", "shared", "shared-sealed"  # names in handoff_parts.ways
_NAMES = {TCP: "loopback TCP", SAME_HOST: "shared memory", SEALED: "shared memory, sealed"}
_GOALS = {
    TCP: Goal("≥ 4 GB/s", Against.VALUE, 4e9, is_at_least=True),
    SAME_HOST: Goal("≥ 20 GB/s", Against.VALUE, 20e9, is_at_least=True),
    SEALED: Goal("≥ 12 GB/s", Against.VALUE, 12e9, is_at_least=True),
}


def fact_name(way: str) -> str:
    """The name of the fact with a hand-off's time, with all blocks ready."""
    return f"seconds of a hand-off over {_NAMES[way]}"


def measure_handoff(context: Context) -> Iterator[Finding]:
    """A row for each way."""
    sizes = _round_sizes(context)
    limits = context.limits
    slower = None if limits is None else min(limits.to_host_bytes_per_s, limits.to_device_bytes_per_s)
    at_sender, at_receiver = Pipe()
    start = functools.partial(Side, ends_s=context.ends_s, preload=PRELOADED)
    with start(_receive, context, at_receiver) as receiver, start(_send, context, at_sender) as sender:
        at_sender.close()
        at_receiver.close()
        for way in map(Way, _GOALS):
            median_s = statistics.median(_rounds(context, way, sender, receiver))
            yield Fact(fact_name(way.name), median_s)
            yield Row(
                f"hand-off of {context.sizes.handoff_len:,} tokens, {_NAMES[way.name]}",
                Unit.BYTES_PER_S,
                sizes.nbytes / median_s,
                slower,
                (_GOALS[way.name],),
                note=f"{sizes.nbytes / 1e9:.2f} GB in {median_s * 1e3:.0f} ms, verified and on the device; "
                "floor: one way between device and host",
            )


def _rounds(context: Context, way: Way, sender: Side, receiver: Side) -> list[float]:
    """Seconds of each round after the first: from ready blocks to verified blocks in the pool."""
    receiver.tell(way)
    sender.tell((way, receiver.hear()))
    digest = sender.hear()
    run_round(sender, receiver, digest)
    seconds = [run_round(sender, receiver).seconds for _ in range(context.sizes.handoff_rounds)]
    sender.tell(None)
    receiver.tell(None)
    return seconds


def _receive(connection: Connection, context: Context, peer: Connection) -> None:
    """For every way from the connection: report the address, and receive rounds."""
    keep_freed_memory()
    sizes = _round_sizes(context)
    pool = _pool(context, sizes.num_blocks + 1)  # a lease has room for the first token after the prompt

    def clear() -> None:
        pool.tensor.zero_()
        if context.device.type == "cuda":
            torch.cuda.synchronize()

    for way in heard(connection):
        receiver = KvrelayReceiver(cast(Pool, pool), sizes, peer, way, settle=lambda: settle(pool))
        connection.send(receiver.address)
        receive_rounds(connection, receiver, clear, lambda: _digest(pool, sizes.num_blocks))


def _send(connection: Connection, context: Context, peer: Connection) -> None:
    """For every way and receiver's address from the connection: report the pool's digest, and send rounds."""
    keep_freed_memory()
    sizes = _round_sizes(context)
    pool = _pool(context, sizes.num_blocks)
    pool.tensor.normal_(generator=context.generator())
    digest = _digest(pool, sizes.num_blocks)
    for way, address in heard(connection):
        sender = KvrelaySender(cast(Pool, pool), sizes, peer, address, way)
        connection.send(digest)
        send_rounds(connection, sender)


def settle(pool: KvPool) -> None:
    """Wait until the device has all closed blocks. Verified blocks may still be only in pinned memory."""
    if (copied := pool.order_steps()) is not None:
        copied.synchronize()


def _round_sizes(context: Context) -> RoundSizes:
    shape = context.sizes.shape
    return RoundSizes(BLOCK_SIZE * shape.kv_bytes_per_token, context.sizes.handoff_len // BLOCK_SIZE)


def _pool(context: Context, num_blocks: int) -> KvPool:
    geometry = geometry_of(
        parse_config(context.sizes.shape.config(), "the benchmark's model"), BLOCK_SIZE, context.dtype
    )
    staging = StagingPlan(CudaCopies(context.device)) if context.device.type == "cuda" else None
    return KvPool(geometry, num_blocks, context.device, staging=staging)


def _digest(pool: KvPool, num_blocks: int) -> str:
    pool.order_steps()
    kept = pool.tensor[:num_blocks].cpu().view(-1).view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(kept.numpy().data)
