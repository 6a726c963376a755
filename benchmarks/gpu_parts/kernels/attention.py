"""Times of the attention kernels: decode by batch and context, prefill by length and cached prefix."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from gpu_parts.frame.floors import decode_attention_bytes, prefill_attention_flops
from gpu_parts.frame.rows import Against, Goal, Peer, Row, Unit
from gpu_parts.frame.running import Context, Finding, Note
from gpu_parts.frame.sizes import BLOCK_SIZE
from gpu_parts.frame.timing import Stopwatch
from gpu_parts.kernels.paged import decode_call, paged_context, prefill_call, random_pool
from gpu_parts.kernels.peers import NO_TIME, Problem, measure_peers

_FP8 = torch.float8_e4m3fn
_LARGE_BYTES = 1e9  # from this size on, the bandwidth goal applies
_LONG_PROMPT = 8192
_POOL_SHARE = 0.3  # share of free memory: some peers copy all keys and values
_CELL_S = 2.0  # with less time left, a cell is skipped,
_PEERS_S = 5.0  # its peers are,
_COMPILE_S = 20.0  # and the peer that is compiled
_BANDWIDTH = Goal("≥ 85 % of the copy bandwidth", Against.FLOOR, 1 / 0.85)
_DECODE_PEER = Goal("≥ 1x the best peer", Against.PEER, 1.0)
_FP8_PEER = Goal("≥ 1.7x of bf16", Against.PEER, 1 / 1.7)
_ARITHMETIC = Goal("≥ 65 % of the matmul rate", Against.FLOOR, 1 / 0.65)
_PREFILL_PEER = Goal("≥ 0.9x the best peer", Against.PEER, 1 / 0.9)


def measure_decode(context: Context) -> Iterator[Finding]:
    """One row for each cell of the grid that fits in memory."""
    stopwatch, shape = context.stopwatch(), context.sizes.shape
    for batch, length in _largest_first(context.sizes.decode_cells):
        name = f"decode attention, {batch} x {length:,}"
        if context.remaining_s < _CELL_S:
            yield Row(name, Unit.SECONDS, None, note=NO_TIME)
            continue
        pool = _pool(context, _num_blocks(batch, length), context.dtype)
        if pool is None:
            yield Row(name, Unit.SECONDS, None, note="its KV and a contiguous copy of it do not fit the memory")
            continue
        problem = _problem(context, pool, batch, 1, length)
        out = torch.empty_like(problem.query)
        value = stopwatch.median_s(decode_call(problem.query, problem.paged, out))
        yield _ours(name, value)
        nbytes = decode_attention_bytes(shape, batch, length)
        yield Row(
            name,
            Unit.SECONDS,
            value,
            None if context.limits is None else context.limits.bytes_s(nbytes),
            ((_BANDWIDTH, _DECODE_PEER) if nbytes >= _LARGE_BYTES else (_DECODE_PEER,)),
            _peers(context, problem, out, stopwatch),
            f"{nbytes / 1e9:.2f} GB at {nbytes / value / 1e12:.2f} TB/s; pool of {pool.shape[1]} layers",
        )
        del pool, problem, out
        _forget(context)


def measure_decode_fp8(context: Context) -> Iterator[Finding]:
    """The cells with much KV again, from a pool of e4m3 numbers and from the same pool in the model's format."""
    stopwatch, shape = context.stopwatch(), context.sizes.shape
    for batch, length in _largest_first(context.sizes.decode_cells):
        if decode_attention_bytes(shape, batch, length) < _LARGE_BYTES and not context.is_dry:
            continue
        name = f"decode attention, fp8 KV, {batch} x {length:,}"
        if context.remaining_s < _CELL_S:
            yield Row(name, Unit.SECONDS, None, note=NO_TIME)
            continue
        seconds: dict[torch.dtype, float] = {}
        for dtype in (_FP8, context.dtype):
            pool = _pool(context, _num_blocks(batch, length), dtype)
            if pool is not None:
                problem = _problem(context, pool, batch, 1, length)
                call = decode_call(problem.query, problem.paged, torch.empty_like(problem.query))
                seconds[dtype] = stopwatch.median_s(call)
                del problem, call
            del pool
            _forget(context)
        if len(seconds) < 2:
            yield Row(name, Unit.SECONDS, None, note="its KV does not fit the memory twice")
            continue
        nbytes = decode_attention_bytes(shape, batch, length, itemsize=1)
        yield Row(
            name,
            Unit.SECONDS,
            seconds[_FP8],
            None if context.limits is None else context.limits.bytes_s(nbytes),
            (_FP8_PEER,),
            (Peer(f"{shape.dtype} KV", seconds[context.dtype]),),
            f"{nbytes / 1e9:.2f} GB at {nbytes / seconds[_FP8] / 1e12:.2f} TB/s",
        )


def measure_prefill(context: Context) -> Iterator[Finding]:
    """One row for each length and prefix."""
    stopwatch, shape = context.stopwatch(), context.sizes.shape
    for new, cached in context.sizes.prefill_cells:
        name = f"prefill attention, {new:,} tokens" + (f" behind {cached:,} cached" if cached else "")
        if context.remaining_s < _CELL_S:
            yield Row(name, Unit.SECONDS, None, note=NO_TIME)
            continue
        pool = _pool(context, _num_blocks(1, new + cached), context.dtype)
        assert pool is not None, "a prompt of one layer fits anywhere"
        problem = _problem(context, pool, 1, new, new + cached)
        out = torch.empty_like(problem.query)
        value = stopwatch.median_s(prefill_call(problem.query, [new], problem.paged, out))
        yield _ours(name, value)
        flops = prefill_attention_flops(shape, new, cached)
        yield Row(
            name,
            Unit.SECONDS,
            value,
            None if context.limits is None else context.limits.flops_s(flops),
            ((_ARITHMETIC, _PREFILL_PEER) if new >= _LONG_PROMPT else (_PREFILL_PEER,)),
            _peers(context, problem, out, stopwatch),
            f"{flops / value / 1e12:.0f} TFLOP/s",
        )


def _largest_first(cells: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Cells by their KV: what the goals of bandwidth apply to must not be short of time."""
    return sorted(cells, key=math.prod, reverse=True)


def _ours(name: str, value: float) -> Note:
    """Our time alone. A peer that takes too long ends the section before the row."""
    return Note(f"{name}: ours {Unit.SECONDS.text(value)}")


def _peers(context: Context, problem: Problem, ours: torch.Tensor, stopwatch: Stopwatch) -> tuple[Peer, ...]:
    if context.remaining_s < _PEERS_S:
        return (Peer("all peers", None, NO_TIME),)
    return tuple(measure_peers(problem, ours, stopwatch, may_compile=context.remaining_s > _COMPILE_S))


def _problem(context: Context, pool: torch.Tensor, num_seqs: int, query_len: int, length: int) -> Problem:
    shape, generator = context.sizes.shape, context.generator()
    paged = paged_context(pool, pool.shape[1] - 1, (length,) * num_seqs, generator)
    sizes = (num_seqs * query_len, shape.num_q_heads, shape.head_dim)
    query = torch.empty(sizes, dtype=context.dtype, device=context.device).normal_(generator=generator)
    return Problem(query, query_len, paged)


def _num_blocks(num_seqs: int, length: int) -> int:
    return num_seqs * -(-length // BLOCK_SIZE) + 1  # one pads the tables


def _pool(context: Context, num_blocks: int, dtype: torch.dtype) -> torch.Tensor | None:
    """A pool of random numbers with as many of the model's layers as fit; None if none fits."""
    shape = context.sizes.shape
    layer_nbytes = num_blocks * BLOCK_SIZE * shape.kv_bytes_per_token_and_layer
    num_layers = min(shape.num_layers, _free_nbytes(context) // layer_nbytes)
    return None if num_layers < 1 else random_pool(shape, num_blocks, num_layers, dtype, context.generator())


def _free_nbytes(context: Context) -> int:
    if context.device.type != "cuda":
        return 1 << 24
    return int(torch.cuda.mem_get_info()[0] * _POOL_SHARE)


def _forget(context: Context) -> None:
    if context.device.type == "cuda":
        torch.cuda.empty_cache()
