"""The whole model with random weights: decode steps, the device's idle time between them, and prefill of a long prompt."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from gpu_parts.engine.stepping import DecodeDriver, PrefillDriver, fill_pool, load_engine
from gpu_parts.frame.floors import decode_step_bytes, prefill_flops
from gpu_parts.frame.rows import Against, Goal, Row, Unit
from gpu_parts.frame.running import Context, Finding, Note
from gpu_parts.frame.sizes import BLOCK_SIZE, ModelShape
from gpu_parts.frame.timing import busy_s
from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings

_WARM_UPS = 8
_PROFILED_STEPS = 12
_MEMORY_SHARE = 0.9  # share of a device for weights and K/V; the rest is for steps, graphs and CUDA
_PREFILL_REPEATS = 5
_PREFILL_WARM_UPS = 2  # enough for the defaults to learn the cost of steps
_STEP_GOAL = Goal("≤ 1.25x the floor", Against.FLOOR, 1.25)
_GAP_GOAL = Goal("≤ 3 % of the step", Against.VALUE, 0.03)
_PREFILL_GOAL = Goal("≤ 1.5x the floor", Against.FLOOR, 1.5)


def measure_decode_steps(context: Context) -> Iterator[Finding]:
    """Greedy steps as in the decode worker's model thread, by wall time; and the share in which the device idles."""
    yield from _decode_steps(context, context.sizes.steps, "full")


def measure_decode_steps_int8(context: Context) -> Iterator[Finding]:
    """The same with 8-bit weights, for batches in which weights are most of a step's bytes."""
    if context.device.type != "cuda":
        yield Row(
            "decode step, int8 weights", Unit.SECONDS, None, note="needs a GPU: the model of a dry run is in fp32"
        )
        return
    yield from _decode_steps(context, context.sizes.steps[:-1], "int8")


def _decode_steps(context: Context, steps: Sequence[tuple[int, int]], weight_format: str) -> Iterator[Finding]:
    sizes = context.sizes
    suffix = "" if weight_format == "full" else f", {weight_format} weights"
    growth = sizes.num_steps + 2 * _WARM_UPS + _PROFILED_STEPS
    if context.device.type == "cuda":
        total = torch.cuda.get_device_properties(context.device).total_memory
        for batch, length in (left_out := [one for one in steps if not fits(sizes.shape, *one, growth, total)]):
            yield Row(
                f"decode step{suffix}, {batch} x {length:,}", Unit.SECONDS, None, note="its K/V do not fit this GPU"
            )
        steps = [one for one in steps if one not in left_out]
    num_blocks = max(_num_blocks(batch, length + growth) for batch, length in steps) + 8
    max_num_seqs = max(batch for batch, _ in steps)
    max_batched_tokens = max(512, max_num_seqs)
    engine = load_engine(
        context,
        num_blocks,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        decodes=True,
        weight_format=weight_format,
    )
    yield Note(f"loaded, {context.remaining_s:.0f} s left")
    fill_pool(engine, context.generator())
    yield Note(f"{num_blocks} blocks of random K/V")
    for batch, length in steps:
        settings = DecodeSchedulerSettings(max_num_seqs=max_num_seqs, max_batched_tokens=max_batched_tokens)
        driver = DecodeDriver(engine, settings=settings, seed=context.seed)
        for _ in range(batch):
            driver.add_computed(length - 1, max_tokens=growth + 2)
        for _ in range(_WARM_UPS):
            driver.step()
        steps_s = [driver.step() for _ in range(sizes.num_steps)]
        step_s = statistics.median(steps_s)
        layer_itemsize = None if weight_format == "full" else 1
        nbytes = decode_step_bytes(sizes.shape, batch, length + _WARM_UPS + sizes.num_steps // 2, layer_itemsize)
        slowest = statistics.quantiles(steps_s, n=20)[-1]
        yield Row(
            f"decode step{suffix}, {batch} x {length:,}",
            Unit.SECONDS,
            step_s,
            None if context.limits is None else context.limits.bytes_s(nbytes),
            (_STEP_GOAL,),
            note=f"greedy, on the wall; p95 {slowest * 1e3:.2f} ms; {nbytes / 1e9:.2f} GB",
        )
        yield _gap_row(context, f"device idle between decode steps{suffix}, {batch} x {length:,}", driver, step_s)
        driver.clear()
    if sizes.num_steps and context.limits is not None:
        yield Note("floors: weights without the embedding, and all K/V, over the copy bandwidth")


def fits(shape: ModelShape, batch: int, length: int, growth: int, total_nbytes: int) -> bool:
    """Whether a device with ``total_nbytes`` holds the full model and the K/V of ``batch`` sequences, with room for steps."""
    weights = (shape.num_layer_weights + 2 * shape.num_head_weights) * shape.itemsize
    kv = _num_blocks(batch, length + growth) * BLOCK_SIZE * shape.kv_bytes_per_token
    return weights + kv <= _MEMORY_SHARE * total_nbytes


def _num_blocks(batch: int, length: int) -> int:
    return batch * -(-length // BLOCK_SIZE)


def measure_prefill_steps(context: Context) -> Iterator[Finding]:
    """A fresh prompt until its first token, by chunk size. The first size is compared with the goal.

    The last case uses the default settings, which learn suitable steps.
    """
    sizes = context.sizes
    # Published blocks stay cached. With room for a few prompts, the oldest blocks are reused.
    num_blocks = 3 * -(-sizes.prefill_len // BLOCK_SIZE) + 8
    engine = load_engine(
        context, num_blocks, max_num_seqs=8, max_batched_tokens=max(sizes.prefill_chunks), decodes=False
    )
    yield Note(f"loaded, {context.remaining_s:.0f} s left")
    flops = prefill_flops(sizes.shape, sizes.prefill_len)
    # Without a budget every step is a whole chunk.
    ways = [
        (f"in chunks of {chunk:,}", PrefillSchedulerSettings(max_batched_tokens=chunk, ttft_budget_ms=0))
        for chunk in sizes.prefill_chunks
    ]
    ways.append(("as by default", PrefillSchedulerSettings()))
    for number, (way, settings) in enumerate(ways):
        driver = PrefillDriver(engine, settings=settings, seed=context.seed + number)
        for _ in range(_PREFILL_WARM_UPS):
            driver.prefill(sizes.prefill_len)
        num_steps = driver.num_steps
        seconds = statistics.median(driver.prefill(sizes.prefill_len) for _ in range(_PREFILL_REPEATS))
        num_steps = (driver.num_steps - num_steps) // _PREFILL_REPEATS
        yield Row(
            f"prefill, {sizes.prefill_len:,} tokens {way}",
            Unit.SECONDS,
            seconds,
            None if context.limits is None else context.limits.flops_s(flops),
            (_PREFILL_GOAL,) if number in (0, len(ways) - 1) else (),
            note=f"{num_steps} steps; {flops / seconds / 1e12:.0f} TFLOP/s; {sizes.prefill_len / seconds:,.0f} tokens/s",
        )


def _gap_row(context: Context, name: str, driver: DecodeDriver, step_s: float) -> Row:
    """The idle share: the part of an undisturbed step that exceeds the device's busy time under the profiler."""
    if context.device.type != "cuda":
        return Row(name, Unit.SHARE, None, note="no device that could idle")
    driver.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(_PROFILED_STEPS):
            driver.step()
        torch.cuda.synchronize()
    events = profiler.events()
    intervals = [
        (event.time_range.start, event.time_range.end)
        for event in (events or [])
        if event.device_type == DeviceType.CUDA
    ]
    if not intervals:
        return Row(name, Unit.SHARE, None, note="the profiler saw no kernel")
    # A step may already run when the profiler starts, and one runs when it ends. Both count, or neither.
    of_step_s = busy_s(intervals) * 1e-6 / _PROFILED_STEPS
    span_s = (max(end for _, end in intervals) - min(start for start, _ in intervals)) * 1e-6
    under_profiler = 1 - of_step_s * _PROFILED_STEPS / span_s
    return Row(
        name,
        Unit.SHARE,
        max(0.0, 1 - of_step_s / step_s),
        goals=(_GAP_GOAL,),
        note=f"device busy {of_step_s * 1e3:.2f} ms of {step_s * 1e3:.2f} ms; idle under the profiler {under_profiler:.1%}",
    )
