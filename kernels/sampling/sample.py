"""Next-token sampling: temperature, top-k, top-p, min-p and an inverse-CDF draw, without a sort.

There are two launches, see `sample_kernels`. The first reads every logit once. The second reads only the few groups of tokens
that can pass the filters. The caller provides the uniform numbers: this module has no random state. Penalties come before, see
`penalties`.
"""

from __future__ import annotations

import math

import torch
import triton

from kvrelay.kernels.checks import next_power_of_2, require_dtype, require_shape, require_unit_stride
from kvrelay.kernels.sampling.sample_kernels import MIN_TEMPERATURE, draw_kernel, group_kernel

_LOG2_E = math.log2(math.e)
# Tokens of a group: a cache line of 128 bytes. Groups are larger if the draw's program, which holds all groups of a row,
# would have too many.
_MIN_GROUP = 32
_MAX_GROUPS = 4096
# Logits of one program's tile: 16 per thread of the draw's 16 warps, 32 per thread of the 4 warps before it.
_DRAW_TILE = 8192
_GROUP_TILE = 4096


def kept_mask_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that pass the filters, and their weights.

    Arguments as for `sample`; temperature 0 is treated as temperature 1.

    Returns:
        `kept [num_seqs, vocab]` bool and `weights [num_seqs, vocab]` float64, 1 for the largest logit,
        0 where not kept.
    """
    vocab = logits.shape[1]
    wide = logits.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).double()
    divisor = torch.where(temperature > 0, temperature, 1.0).double().clamp(min=MIN_TEMPERATURE.value)
    maximum = wide.amax(1, keepdim=True)
    weights = torch.where(wide == maximum, 1.0, ((wide - maximum) / divisor[:, None]).exp())
    sorted_logits, order = wide.sort(dim=1, descending=True)

    kth = torch.where((top_k > 0) & (top_k < vocab), top_k.long(), vocab) - 1
    kept = wide >= sorted_logits.gather(1, kth[:, None])

    mass = torch.where(kept, weights, 0.0).gather(1, order).cumsum(1)
    last = (mass < top_p.double()[:, None] * mass[:, -1:]).sum(1, keepdim=True).clamp(max=vocab - 1)
    nucleus = kept & (wide >= sorted_logits.gather(1, last))
    kept = torch.where((top_p < 1)[:, None], nucleus, kept)

    kept &= weights >= min_p.double()[:, None]
    return kept, torch.where(kept, weights, 0.0)


def sample_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """The same as `sample`, with a sort and float64 sums."""
    clean = logits.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    greedy = (clean == clean.amax(1, keepdim=True)).int().argmax(1)
    _, weights = kept_mask_reference(logits, temperature, top_k, top_p, min_p)
    cumulative = weights.cumsum(1)
    target = uniforms.double()[:, None] * cumulative[:, -1:]
    drawn = ((cumulative > target) & (weights > 0)).int().argmax(1)
    return torch.where(temperature > 0, drawn, greedy)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """Draw one token per row.

    In this order: divide by the temperature; top-k keeps the logits >= the k-th largest; top-p keeps the
    smallest set of most probable tokens whose share of what top-k left is >= top_p, with all ties of its
    last token; min-p keeps probabilities >= min_p times the largest. The token drawn is the first, in
    vocabulary order, whose cumulative probability exceeds `uniform * total`. Sums are fp32: where top_p or
    the uniform lies within rounding of a boundary, the token on either side may be taken; a token that the
    filters exclude never is, unless a row has no logit above -inf.

    Args:
        logits: `[num_seqs, vocab]` fp32, last stride 1; NaN counts as -inf. Not changed.
        temperature: `[num_seqs]` fp32; 0 takes the largest logit, of several the lowest token id.
        top_k: `[num_seqs]` int32 or int64, 0 = off.
        top_p: `[num_seqs]` fp32, 1 = off.
        min_p: `[num_seqs]` fp32 in [0, 1], 0 = off.
        uniforms: `[num_seqs]` fp32 in [0, 1).

    Returns:
        `[num_seqs]` int64 token ids.

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    require_shape("logits", logits, ("num_seqs", "vocab"))
    require_dtype("logits", logits, torch.float32)
    require_unit_stride("logits", logits)
    num_seqs, vocab = logits.shape
    for name, tensor, dtypes in (
        ("temperature", temperature, (torch.float32,)),
        ("top_k", top_k, (torch.int32, torch.int64)),
        ("top_p", top_p, (torch.float32,)),
        ("min_p", min_p, (torch.float32,)),
        ("uniforms", uniforms, (torch.float32,)),
    ):
        require_shape(name, tensor, (num_seqs,))
        require_dtype(name, tensor, *dtypes)
        require_unit_stride(name, tensor)
    group = max(_MIN_GROUP, next_power_of_2(triton.cdiv(vocab, _MAX_GROUPS)))
    num_groups = triton.cdiv(vocab, group)
    # Separate tensors: offsets inside a common one would change with the number of rows, and with them the specialised
    # kernels.
    maxima = torch.empty((num_seqs, num_groups), dtype=torch.float32, device=logits.device)
    masses = torch.empty((num_seqs, num_groups), dtype=torch.float32, device=logits.device)
    listed = torch.empty((num_seqs, num_groups), dtype=torch.int32, device=logits.device)
    tokens = torch.empty((num_seqs,), dtype=torch.int64, device=logits.device)
    groups_per_program = min(_GROUP_TILE // group, next_power_of_2(num_groups))
    group_kernel[(num_seqs, triton.cdiv(num_groups, groups_per_program))](
        logits,
        temperature,
        maxima,
        masses,
        vocab,
        num_groups,
        logits.stride(0),
        GROUP=group,
        GROUPS=groups_per_program,
        LOG2_E=_LOG2_E,
        num_warps=4,
    )
    draw_kernel[(num_seqs,)](
        logits,
        maxima,
        masses,
        listed,
        temperature,
        top_k,
        top_p,
        min_p,
        uniforms,
        tokens,
        vocab,
        num_groups,
        logits.stride(0),
        GROUP=group,
        GROUPS=next_power_of_2(num_groups),
        BLOCK=min(_DRAW_TILE, group * next_power_of_2(num_groups)),
        LOG2_E=_LOG2_E,
        num_warps=16,
    )
    return tokens
