"""The whole model with random weights: decode steps, the device's idle time between them, and prefill of a long prompt."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_parts.engine.model_dir import model_directory, stored_model_directory
from gpu_parts.engine.profiles import profiled
from gpu_parts.engine.stepping import DecodeDriver, PrefillDriver, fill_pool, load_engine
from gpu_parts.frame.floors import decode_step_bytes, prefill_flops, stored_itemsize
from gpu_parts.frame.rows import Against, Goal, Peer, Row, Unit
from gpu_parts.frame.running import Context, Fact, Finding, Note
from gpu_parts.frame.sizes import BLOCK_SIZE, ModelShape
from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings

_WARM_UPS = 8
_PROFILED_STEPS = 12
_MEMORY_SHARE = 0.9  # share of a device for weights and K/V; the rest is for steps, graphs and CUDA
_PREFILL_REPEATS = 5
_PREFILL_WARM_UPS = 2  # enough for the defaults to learn the cost of steps
_STEP_GOAL = Goal("≤ 1.25x the floor", Against.FLOOR, 1.25)
_FASTER_GOAL = Goal("≥ 1.7x the tokens/s of full weights", Against.PEER, 1 / 1.7)
_GAP_GOAL = Goal("≤ 3 % of the step", Against.VALUE, 0.03)
_PREFILL_GOAL = Goal("≤ 1.5x the floor", Against.FLOOR, 1.5)


@dataclass(frozen=True, slots=True)
class _Weights:
    """How a model's weights are stored or rounded."""

    name: str  # in figures; empty: full
    weight_format: str = "full"  # the engine's option
    layer_itemsize: float | None = None  # bytes of a layer's weight element, if not the model's
    directory: Callable[[Context], Path] = model_directory
    is_compared: bool = False  # with full weights


def measure_decode_steps(context: Context) -> Iterator[Finding]:
    """Greedy steps as in the decode worker's model thread, by wall time; and the share in which the device idles."""
    yield from _decode_steps(context, context.sizes.steps, _Weights(""))


def measure_decode_steps_int8(context: Context) -> Iterator[Finding]:
    """The same with 8-bit weights, for batches in which weights are most of a step's bytes."""
    yield from _rounded_steps(context, context.sizes.steps[:-1], _Weights("int8", "int8", 1))


def measure_decode_steps_fp8(context: Context) -> Iterator[Finding]:
    """The same in fp8, for the smallest batch, compared with full weights."""
    yield from _rounded_steps(context, context.sizes.steps[:1], _Weights("fp8", "fp8", 1, is_compared=True))


def measure_decode_steps_4bit(context: Context) -> Iterator[Finding]:
    """The same with a checkpoint of 4-bit weights. In a dry run the CPU's engine expands them when it loads them."""
    sizes = context.sizes
    itemsize = stored_itemsize(sizes.group_size, sizes.shape.itemsize)
    weights = _Weights("4-bit", layer_itemsize=itemsize, directory=stored_model_directory, is_compared=True)
    yield from _decode_steps(context, sizes.steps[:1], weights)


def full_step_fact(batch: int, length: int) -> str:
    """The name of the fact with a step's time with full weights."""
    return f"seconds of a decode step with full weights, {batch} x {length:,}"


def _rounded_steps(context: Context, steps: Sequence[tuple[int, int]], weights: _Weights) -> Iterator[Finding]:
    if context.device.type != "cuda":
        note = "needs a GPU: the model of a dry run is in fp32"
        yield Row(f"decode step, {weights.name} weights", Unit.SECONDS, None, note=note)
        return
    yield from _decode_steps(context, steps, weights)


def _decode_steps(context: Context, steps: Sequence[tuple[int, int]], weights: _Weights) -> Iterator[Finding]:
    sizes = context.sizes
    suffix = f", {weights.name} weights" if weights.name else ""
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
        weight_format=weights.weight_format,
        directory=weights.directory(context),
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
        mean_length = length + _WARM_UPS + sizes.num_steps // 2
        nbytes = decode_step_bytes(sizes.shape, batch, mean_length, weights.layer_itemsize)
        full_s = context.facts.get(full_step_fact(batch, length)) if weights.is_compared else None
        is_missing = weights.is_compared and full_s is None
        missing = "; the section decode-step did not measure full weights" if is_missing else ""
        slowest = statistics.quantiles(steps_s, n=20)[-1]
        yield Row(
            f"decode step{suffix}, {batch} x {length:,}",
            Unit.SECONDS,
            step_s,
            None if context.limits is None else context.limits.bytes_s(nbytes),
            (_STEP_GOAL, _FASTER_GOAL) if weights.is_compared else (_STEP_GOAL,),
            () if full_s is None else (Peer(f"{sizes.shape.dtype} weights", full_s),),
            f"greedy, on the wall; p95 {slowest * 1e3:.2f} ms; {nbytes / 1e9:.2f} GB{missing}",
        )
        if not weights.name:
            yield Fact(full_step_fact(batch, length), step_s)
        yield from _gap(context, f"device idle between decode steps{suffix}, {batch} x {length:,}", driver, step_s)
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
        if context.device.type == "cuda" and number == 0:
            seen = profiled(lambda driver=driver: driver.prefill(sizes.prefill_len), 1)  # type: ignore[misc]
            if seen is not None:
                yield Note(f"a prompt: device busy {seen.busy_s * 1e3:.1f} ms: {seen.text()}")


def _gap(context: Context, name: str, driver: DecodeDriver, step_s: float) -> Iterator[Finding]:
    """The idle share: the part of an undisturbed step that exceeds the device's busy time under the profiler.

    And a note of the costliest kernels.
    """
    if context.device.type != "cuda":
        yield Row(name, Unit.SHARE, None, note="no device that could idle")
        return
    driver.step()
    seen = profiled(driver.step, _PROFILED_STEPS)
    if seen is None:
        yield Row(name, Unit.SHARE, None, note="the profiler saw no kernel")
        return
    busy = f"device busy {seen.busy_s * 1e3:.2f} ms of {step_s * 1e3:.2f} ms"
    yield Row(
        name,
        Unit.SHARE,
        max(0.0, 1 - seen.busy_s / step_s),
        goals=(_GAP_GOAL,),
        note=f"{busy}; idle under the profiler {seen.idle_share:.1%}",
    )
    yield Note(f"a step: {seen.text()}")
