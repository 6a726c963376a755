"""Sampling with penalties, top-k and top-p: the kernels alone, and all of it as a step of the engine calls it.

A step has logits in the model's format, makes them fp32, uploads penalties and filters, and runs the kernels; if it runs ahead,
each row's last token is on the device only and is counted there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch

from gpu_parts.rows import Against, Goal, Peer, Row, Unit
from gpu_parts.running import Context, Finding
from gpu_parts.sizes import BLOCK_SIZE
from gpu_parts.timing import Stopwatch
from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.kv_pool import KvPool
from kvrelay.engine.model_config import parse_config
from kvrelay.engine.ops_cuda import CudaOps
from kvrelay.engine.sampled import UnderWay
from kvrelay.engine.sampler import sample as sample_step
from kvrelay.engine.sequence import Sequence
from kvrelay.kernels import apply_penalties, sample

_HISTORY = 1024  # distinct tokens of each row that have penalties
_COUNTED_ROWS = 64
_HOST_REPEATS = 20
# Read before each repeat, a GiB or a third of a millisecond each: the device is busy while the host prepares a step's sampling.
_NUM_FLUSHES = 40
_GOAL = Goal("≤ 150 µs", Against.VALUE, 150e-6)
_PARAMS = SamplingParams(
    max_tokens=4096,
    temperature=0.8,
    top_k=50,
    top_p=0.95,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
)


def measure_sampling(context: Context) -> Iterator[Finding]:
    """Rows for the kernels, then for a step's sampling, with and without a token under way; their floor is one pass over logits."""
    stopwatch, generator, device = context.stopwatch(), context.generator(), context.device
    for num_rows, vocab in context.sizes.sampling_batches:
        logits = torch.randn(num_rows, vocab, device=device, generator=generator) * 3
        num_entries = min(_HISTORY, vocab // 2)
        tokens = torch.stack([torch.randperm(vocab, device=device, generator=generator) for _ in range(num_rows)])
        tokens = tokens[:, :num_entries].contiguous()
        filters = (
            torch.full((num_rows,), _PARAMS.temperature, device=device),
            torch.full((num_rows,), _PARAMS.top_k, dtype=torch.int32, device=device),
            torch.full((num_rows,), _PARAMS.top_p, device=device),
            torch.zeros(num_rows, device=device),
            torch.rand(num_rows, device=device, generator=generator),
        )
        name, goals = f"{num_rows} x {vocab:,}", (_GOAL,) if num_rows >= _COUNTED_ROWS else ()
        kernels = _kernels(logits.clone(), tokens, filters, generator)
        yield Row(
            f"sampling, {name}, top-k, top-p, penalties",
            Unit.SECONDS,
            stopwatch.median_s(kernels),
            None if context.limits is None else context.limits.bytes_s(logits.nbytes),
            goals,
            (Peer("torch, sorting", stopwatch.median_s(_sorting(logits, filters))),),
            f"the kernels alone, on fp32; {num_entries} penalised tokens per row",
        )
        for is_ahead in (False, True):
            call = step_call(context, logits.to(context.dtype), tokens, is_ahead=is_ahead)
            stopwatch.synchronize()
            host_s = statistics.median(
                _host_s(call, stopwatch) for _ in range(min(_HOST_REPEATS, context.sizes.max_repeats))
            )
            yield Row(
                f"sampling in a step{' that runs ahead' if is_ahead else ''}, {name}, top-k, top-p, penalties",
                Unit.SECONDS,
                stopwatch.median_s(call, num_flushes=_NUM_FLUSHES),
                None if context.limits is None else context.limits.bytes_s(num_rows * vocab * context.dtype.itemsize),
                goals,
                note=f"from {context.sizes.shape.dtype}, with the uploads; the host takes {host_s * 1e3:.2f} ms",
            )


def step_call(context: Context, logits: torch.Tensor, tokens: torch.Tensor, *, is_ahead: bool) -> Callable[[], object]:
    """What a step does with ``logits`` ``[num_rows, vocab]`` in the model's format, for sequences of ``tokens`` ``[num_rows, n]``.

    ``is_ahead``: each row has one more token, which only the device knows.
    """
    config = parse_config(context.sizes.shape.config(), "the benchmark's model")
    pool = KvPool(config, 1, BLOCK_SIZE, context.dtype, context.device)  # that nobody reads
    ops = CudaOps(config, pool.tensor, BLOCK_SIZE, len(logits))
    num_prompt = tokens.shape[1] // 2
    sequences = [Sequence(f"s{number}", 1, row, num_prompt, _PARAMS, 0.0) for number, row in enumerate(tokens.tolist())]
    under_way: UnderWay | None = None
    if is_ahead:
        under_way = UnderWay([1] * len(logits), tokens[:, -1].contiguous())
    return lambda: sample_step(logits, sequences, ops, {}, under_way)


def _kernels(
    logits: torch.Tensor, tokens: torch.Tensor, filters: tuple[torch.Tensor, ...], generator: torch.Generator
) -> Callable[[], torch.Tensor]:
    """Two launches on what is there already. Penalties change ``logits`` a little more each time, which costs nothing."""
    num_rows, num_entries = tokens.shape
    rows = torch.arange(num_rows, device=logits.device).repeat_interleave(num_entries)
    entries = tokens.flatten()
    counts = torch.randint(3, (len(entries),), device=logits.device, generator=generator).int()
    repetition, presence, frequency = (
        torch.full((num_rows,), value, device=logits.device)
        for value in (_PARAMS.repetition_penalty, _PARAMS.presence_penalty, _PARAMS.frequency_penalty)
    )

    def run() -> torch.Tensor:
        apply_penalties(logits, rows, entries, counts, repetition, presence, frequency)
        return sample(logits, *filters)

    return run


def _host_s(call: Callable[[], object], stopwatch: Stopwatch) -> float:
    """How long the host takes to launch it."""
    begun_s = time.perf_counter()
    call()
    seconds = time.perf_counter() - begun_s
    stopwatch.synchronize()
    return seconds


def _sorting(logits: torch.Tensor, filters: tuple[torch.Tensor, ...]) -> Callable[[], torch.Tensor]:
    """Top-k and top-p as one writes them in torch, without penalties."""
    temperature, top_k, top_p, _, uniforms = filters
    largest = int(top_k.max())

    def run() -> torch.Tensor:
        values, order = (logits / temperature[:, None]).sort(dim=1, descending=True)
        values[:, largest:] = -torch.inf
        weights = values.softmax(1)
        weights = weights.masked_fill(weights.cumsum(1) - weights > top_p[:, None], 0.0)
        cumulative = weights.cumsum(1)
        place = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:])
        return order.gather(1, place.clamp(max=largest - 1))

    return run
