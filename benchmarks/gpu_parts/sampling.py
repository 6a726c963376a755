"""The sampler's kernels: penalties, then temperature, top-k, top-p and the draw, as a step of the engine launches them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from gpu_parts.rows import Against, Goal, Peer, Row, Unit
from gpu_parts.running import Context, Finding
from kvrelay.kernels import apply_penalties, sample

_HISTORY = 1024  # distinct tokens of each row that have penalties
_COUNTED_ROWS = 64
_GOAL = Goal("≤ 150 µs", Against.VALUE, 150e-6)


def measure_sampling(context: Context) -> Iterator[Finding]:
    """Filtered sampling with penalties; its floor is one pass over the logits."""
    stopwatch, generator, device = context.stopwatch(), context.generator(), context.device
    for num_rows, vocab in context.sizes.sampling_batches:
        logits = torch.randn(num_rows, vocab, device=device, generator=generator) * 3
        num_entries = min(_HISTORY, vocab // 2)
        tokens = torch.stack([torch.randperm(vocab, device=device, generator=generator) for _ in range(num_rows)])
        entries = tokens[:, :num_entries].flatten().contiguous()
        rows = torch.arange(num_rows, device=device).repeat_interleave(num_entries)
        counts = torch.randint(3, (len(entries),), device=device, generator=generator).int()
        penalties = [torch.full((num_rows,), value, device=device) for value in (1.1, 0.1, 0.1)]
        filters = (
            torch.full((num_rows,), 0.8, device=device),
            torch.full((num_rows,), 50, dtype=torch.int32, device=device),
            torch.full((num_rows,), 0.95, device=device),
            torch.zeros(num_rows, device=device),
        )
        uniforms = torch.rand(num_rows, device=device, generator=generator)

        def both(
            logits: torch.Tensor = logits,
            of: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = (rows, entries, counts),
            penalties: list[torch.Tensor] = penalties,
            filters: tuple[torch.Tensor, ...] = (*filters, uniforms),
        ) -> torch.Tensor:
            repetition, presence, frequency = penalties
            # It changes them a little more each time, which costs nothing.
            apply_penalties(logits, *of, repetition, presence, frequency)
            return sample(logits, *filters)

        yield Row(
            f"sampling, {num_rows} x {vocab:,}, top-k, top-p, penalties",
            Unit.SECONDS,
            stopwatch.median_s(both),
            None if context.limits is None else context.limits.bytes_s(logits.nbytes),
            (_GOAL,) if num_rows >= _COUNTED_ROWS else (),
            (Peer("torch, sorting", stopwatch.median_s(_sorting(logits, filters, uniforms))),),
            f"{num_entries} penalised tokens per row",
        )


def _sorting(
    logits: torch.Tensor, filters: tuple[torch.Tensor, ...], uniforms: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """Top-k and top-p as one writes them in torch, without penalties."""
    temperature, top_k, top_p, _ = filters
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
