"""The sampling kernels with penalties, top-k and top-p. The idle time of decode steps includes the rest of sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from gpu_parts.frame.rows import Against, Goal, Peer, Row, Unit
from gpu_parts.frame.running import Context, Finding
from kvrelay.kernels.sampling.penalties import apply_penalties
from kvrelay.kernels.sampling.sample import sample

_HISTORY = 1024  # distinct penalised tokens of each row
_COUNTED_ROWS = 64
_GOAL = Goal("≤ 150 µs", Against.VALUE, 150e-6)
_TEMPERATURE, _TOP_K, _TOP_P = 0.8, 50, 0.95
_REPETITION, _PRESENCE, _FREQUENCY = 1.1, 0.1, 0.1


def measure_sampling(context: Context) -> Iterator[Finding]:
    """A row for each batch. The floor is one pass over its logits."""
    stopwatch, generator, device = context.stopwatch(), context.generator(), context.device
    for num_rows, vocab in context.sizes.sampling_batches:
        logits = torch.randn(num_rows, vocab, device=device, generator=generator) * 3
        num_entries = min(_HISTORY, vocab // 2)
        tokens = torch.stack([torch.randperm(vocab, device=device, generator=generator) for _ in range(num_rows)])
        tokens = tokens[:, :num_entries].contiguous()
        filters = (
            torch.full((num_rows,), _TEMPERATURE, device=device),
            torch.full((num_rows,), _TOP_K, dtype=torch.int32, device=device),
            torch.full((num_rows,), _TOP_P, device=device),
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
            f"on fp32; {num_entries} penalised tokens per row",
        )


def _kernels(
    logits: torch.Tensor, tokens: torch.Tensor, filters: tuple[torch.Tensor, ...], generator: torch.Generator
) -> Callable[[], torch.Tensor]:
    """Two launches on prepared tensors. Penalties change ``logits`` slightly each time, which does not affect the time."""
    num_rows, num_entries = tokens.shape
    rows = torch.arange(num_rows, device=logits.device).repeat_interleave(num_entries)
    entries = tokens.flatten()
    counts = torch.randint(3, (len(entries),), device=logits.device, generator=generator).int()
    repetition, presence, frequency = (
        torch.full((num_rows,), value, device=logits.device) for value in (_REPETITION, _PRESENCE, _FREQUENCY)
    )

    def run() -> torch.Tensor:
        apply_penalties(logits, rows, entries, counts, repetition, presence, frequency)
        return sample(logits, *filters)

    return run


def _sorting(logits: torch.Tensor, filters: tuple[torch.Tensor, ...]) -> Callable[[], torch.Tensor]:
    """Top-k and top-p in plain torch, without penalties."""
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
