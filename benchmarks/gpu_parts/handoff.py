"""A hand-off of a long prompt's KV between two processes that share the device: each way, from pool to pool, proved.

The way of a block is device, pinned memory, socket or shared memory, pinned memory, device; the copies between device and pinned
memory run beside the others, and bound it. Leases, transfers and both ends are kvrelay's own, driven as in :mod:`handoff_ways`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe
from typing import cast

import torch
import xxhash
from handoff_pools import Pool
from handoff_pools import Sizes as RoundSizes
from handoff_ways import KvrelayReceiver, KvrelaySender

from gpu_parts.processes import Side
from gpu_parts.rows import Against, Goal, Row, Unit
from gpu_parts.running import Context, Fact, Finding
from gpu_parts.sizes import BLOCK_SIZE
from kvrelay.common.memory import keep_freed_memory
from kvrelay.engine.copies import CudaCopies, StagingPlan
from kvrelay.engine.kv_pool import KvPool
from kvrelay.engine.model_config import parse_config

TCP, SAME_HOST = "loopback TCP", "shared memory"
_GOALS = {
    TCP: Goal("≥ 4 GB/s", Against.VALUE, 4e9, is_at_least=True),
    SAME_HOST: Goal("≥ 20 GB/s", Against.VALUE, 20e9, is_at_least=True),
}


def fact_name(way: str) -> str:
    """Under which later sections find how long a hand-off takes, all blocks ready."""
    return f"seconds of a hand-off over {way}"


def measure_handoff(context: Context) -> Iterator[Finding]:
    """Both ways; a row each."""
    sizes = _round_sizes(context)
    limits = context.limits
    slower = None if limits is None else min(limits.to_host_bytes_per_s, limits.to_device_bytes_per_s)
    for way, goal in _GOALS.items():
        seconds = _rounds(context, way)
        median_s = statistics.median(seconds)
        yield Fact(fact_name(way), median_s)
        yield Row(
            f"hand-off of {context.sizes.handoff_len:,} tokens, {way}",
            Unit.BYTES_PER_S,
            sizes.nbytes / median_s,
            slower,
            (goal,),
            note=f"{sizes.nbytes / 1e9:.2f} GB in {median_s * 1e3:.0f} ms, verified; floor: one way between device and host",
        )


def _rounds(context: Context, way: str) -> list[float]:
    """Seconds of each round behind the first, from blocks that are ready to blocks that are verified."""
    at_sender, at_receiver = Pipe()
    with Side(_receive, context, way, at_receiver) as receiver, Side(_send, context, way, at_sender) as sender:
        at_sender.close()
        at_receiver.close()
        sender.tell(receiver.hear())
        digest = sender.hear()
        seconds: list[float] = []
        for number in range(1 + context.sizes.handoff_rounds):
            receiver.tell(number == 0)
            receiver.hear()
            sender.tell("go")
            if (received := receiver.hear()) not in (None, digest):
                raise RuntimeError(f"{way}: the receiver's pool does not hold what was sent ({received})")
            seconds.append(sender.hear())
    return seconds[1:]


def _receive(context: Context, connection: Connection, way: str, peer: Connection) -> None:
    """Receive a round for every word; on a true one tell the pool's digest afterwards."""
    keep_freed_memory()
    sizes = _round_sizes(context)
    pool = _pool(context, sizes.num_blocks + 1)  # a lease has room for the first token behind the prompt
    receiver = KvrelayReceiver(cast(Pool, pool), sizes, peer, seals_kv=False, is_shared=way == SAME_HOST)
    connection.send(receiver.address)
    try:
        while True:
            is_checked = connection.recv()
            connection.send(None)
            receiver.run()
            connection.send(_digest(pool, sizes.num_blocks) if is_checked else None)
    except EOFError:
        receiver.close()


def _send(context: Context, connection: Connection, way: str, peer: Connection) -> None:
    """Send a round for every word."""
    keep_freed_memory()
    sizes = _round_sizes(context)
    pool = _pool(context, sizes.num_blocks)
    pool.tensor.normal_(generator=context.generator())
    if context.device.type == "cuda":
        torch.cuda.synchronize()
    sender = KvrelaySender(cast(Pool, pool), sizes, peer, connection.recv(), seals_kv=False, is_shared=way == SAME_HOST)
    connection.send(_digest(pool, sizes.num_blocks))
    try:
        while True:
            connection.recv()
            connection.send(sender.run())
    except EOFError:
        sender.close()


def _round_sizes(context: Context) -> RoundSizes:
    shape = context.sizes.shape
    return RoundSizes(BLOCK_SIZE * shape.kv_bytes_per_token, context.sizes.handoff_len // BLOCK_SIZE)


def _pool(context: Context, num_blocks: int) -> KvPool:
    config = parse_config(context.sizes.shape.config(), "the benchmark's model")
    staging = StagingPlan(CudaCopies(context.device)) if context.device.type == "cuda" else None
    return KvPool(config, num_blocks, BLOCK_SIZE, context.dtype, context.device, staging=staging)


def _digest(pool: KvPool, num_blocks: int) -> str:
    pool.order_steps()
    kept = pool.tensor[:num_blocks].cpu().view(-1).view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(kept.numpy().data)
