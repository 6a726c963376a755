"""Checks the sampling kernel: which tokens it draws, and how often."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from gpu_parts.frame.rows import Checked, Kernel
from gpu_parts.frame.running import Context, Finding
from kvrelay.kernels.sampling.sample import kept_mask_reference, sample

_MIN_EXPECTED = 5.0  # expected draws from which a token has its own class
_MAX_DEVIATION = 6.0  # standard deviations of chi-squared; a correct kernel exceeds them once in a hundred million runs
_LOOSE = 1e-4  # the kernel sums in fp32, so a token this close to a filter's edge may be on either side


def check_sampling(context: Context) -> Iterator[Finding]:
    """Check greedy rows exactly, filtered rows by the kept tokens, and one distribution by many draws."""
    (num_rows, vocab), device, generator = context.sizes.sampling_batches[0], context.device, context.generator()
    logits = torch.randn(num_rows, vocab, device=device, generator=generator) * 3
    ones, zeros = torch.ones(num_rows, device=device), torch.zeros(num_rows, device=device)
    no_limit = torch.zeros(num_rows, dtype=torch.int32, device=device)
    greedy = sample(logits, zeros, no_limit, ones, zeros, _uniforms(num_rows, generator))
    num_wrong = int((logits.gather(1, greedy[:, None])[:, 0] != logits.amax(1)).sum())
    yield Checked(Kernel.SAMPLING, "greedy rows", num_wrong, 0, "rows without the largest logit:")

    temperature = torch.linspace(0.3, 1.5, num_rows, device=device)
    top_k = (torch.arange(num_rows, device=device) % 4 * 20).int()
    top_p = torch.linspace(0.2, 1.0, num_rows, device=device)
    min_p = torch.linspace(0.0, 0.2, num_rows, device=device).flip(0).contiguous()
    loose = (top_p + _LOOSE).clamp(max=1.0), min_p * (1 - _LOOSE)
    kept, _ = kept_mask_reference(logits, temperature, top_k, *loose)
    drawn = sample(logits, temperature, top_k, top_p, min_p, _uniforms(num_rows, generator))
    num_excluded = int((~kept.gather(1, drawn[:, None])).sum())
    yield Checked(
        Kernel.SAMPLING, f"{num_rows} rows, each with filters of its own", num_excluded, 0, "excluded tokens drawn:"
    )
    yield _distribution(context, logits[:1].expand(num_rows, vocab).contiguous(), generator)


def _distribution(context: Context, logits: torch.Tensor, generator: torch.Generator) -> Checked:
    num_rows, vocab = logits.shape
    device = logits.device
    filters = (
        torch.full((num_rows,), 0.8, device=device),
        torch.full((num_rows,), 50, dtype=torch.int32, device=device),
        torch.full((num_rows,), 0.95, device=device),
        torch.full((num_rows,), 0.01, device=device),
    )
    counts = torch.zeros(vocab, dtype=torch.int64, device=device)
    num_draws = 0
    while num_draws < context.sizes.check_draws:
        drawn = sample(logits, *filters, _uniforms(num_rows, generator))
        counts += torch.bincount(drawn, minlength=vocab)
        num_draws += num_rows
    _, weights = kept_mask_reference(logits[:1], *(one[:1] for one in filters))
    expected = weights[0] / weights[0].sum() * num_draws
    deviation = chi_squared_deviation(counts.double(), expected)
    case = f"{num_draws} draws of one distribution"
    return Checked(Kernel.SAMPLING, case, deviation, _MAX_DEVIATION, "chi-squared, standard deviations above its mean:")


def chi_squared_deviation(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Standard deviations of chi-squared above its mean. Infinite if an impossible token was drawn.

    Both arguments are ``[num_tokens]`` float64. Tokens with few expected draws are counted together.
    """
    if bool((counts[expected == 0] > 0).any()):
        return math.inf
    is_own = expected >= _MIN_EXPECTED
    classes = [counts[is_own], counts[~is_own].sum()[None]], [expected[is_own], expected[~is_own].sum()[None]]
    observed, wanted = (torch.cat(parts) for parts in classes)
    if wanted[-1] < _MIN_EXPECTED:
        observed, wanted = observed[:-1], wanted[:-1]
    num_free = len(wanted) - 1
    if num_free < 1:
        return 0.0
    chi_squared = float(((observed - wanted) ** 2 / wanted).sum())
    return (chi_squared - num_free) / math.sqrt(2 * num_free)


def _uniforms(num_rows: int, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(num_rows, device=generator.device, generator=generator)
