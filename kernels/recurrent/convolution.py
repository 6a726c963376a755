"""A causal convolution of each channel over the last tokens, then silu, for sequences of any lengths.

Its state are the sequence's last inputs. They are copied before the kernels run, so that storing them may overwrite them.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kvrelay.kernels.checks import FLOAT_DTYPES, next_power_of_2, require_dtype, require_shape, require_unit_stride
from kvrelay.kernels.recurrent.ragged import RaggedStates

_TOKENS = 16  # of a program
_CHANNELS = 128  # of a program


def causal_convolution_reference(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, pool: torch.Tensor, states: RaggedStates
) -> torch.Tensor:
    """The same contract as `causal_convolution`; reads numbers on the host."""
    width, found = weight.shape[1], []
    token_starts, part_starts = states.token_starts.tolist(), states.part_starts.tolist()
    for seq in range(states.num_seqs):
        state = pool[states.read[seq]].T if not states.is_new[seq] else pool.new_zeros(width, len(weight))
        for part in range(*part_starts[seq : seq + 2]):
            whole = torch.cat(
                (state, inputs[token_starts[part] : token_starts[part + 1]])
            )  # [width + num_tokens, num_channels]
            added = None if bias is None else bias.double()
            sums = F.conv1d(whole[1:].T.double(), weight[:, None].double(), added, groups=len(weight))
            found.append(F.silu(sums.to(inputs.dtype)).T)
            state = whole[-width:]
            pool[states.write[part]] = state.T
    return torch.cat(found)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["seqs_ptr", "is_new_ptr"])
@no_type_check
def _convolution_kernel(
    inputs_ptr,
    weight_ptr,
    bias_ptr,
    before_ptr,
    out_ptr,
    seqs_ptr,
    token_starts_ptr,
    part_starts_ptr,
    is_new_ptr,
    num_tokens,
    inputs_stride_token,
    NUM_CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_token, is_channel = tokens < num_tokens, channels < NUM_CHANNELS
    is_here = is_token[:, None] & is_channel[None, :]
    seqs = tl.load(seqs_ptr + tokens, mask=is_token, other=0)
    firsts = tl.load(token_starts_ptr + tl.load(part_starts_ptr + seqs))  # their sequences' first tokens in the step
    is_old = tl.load(is_new_ptr + seqs) == 0
    before = (seqs.to(tl.int64)[:, None] * NUM_CHANNELS + channels[None, :]) * WIDTH
    sums = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for place in tl.static_range(WIDTH):
        sources = tokens - (WIDTH - 1 - place)
        ahead = firsts - sources  # tokens before the step
        is_kept = (ahead > 0) & is_old
        given = tl.load(
            inputs_ptr + sources.to(tl.int64)[:, None] * inputs_stride_token + channels[None, :],
            mask=is_here & (ahead <= 0)[:, None],
            other=0.0,
        )
        kept = tl.load(before_ptr + before + (WIDTH - ahead)[:, None], mask=is_here & is_kept[:, None], other=0.0)
        weight = tl.load(weight_ptr + channels * WIDTH + place, mask=is_channel, other=0.0)
        sums += (given.to(tl.float32) + kept.to(tl.float32)) * weight.to(tl.float32)[None, :]
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + channels, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    rounded = sums.to(out_ptr.dtype.element_ty).to(tl.float32)
    found = rounded / (1.0 + tl.exp(-rounded))
    tl.store(out_ptr + tokens.to(tl.int64)[:, None] * NUM_CHANNELS + channels[None, :], found, mask=is_here)


@triton.jit(do_not_specialize_on_alignment=["seqs_ptr", "is_new_ptr", "write_ptr"])
@no_type_check
def _keep_inputs_kernel(
    inputs_ptr,
    before_ptr,
    pool_ptr,
    seqs_ptr,
    token_starts_ptr,
    part_starts_ptr,
    is_new_ptr,
    write_ptr,
    inputs_stride_token,
    pool_stride_block,
    NUM_CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    part = tl.program_id(0)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    places = tl.arange(0, WIDTH_PAD)
    is_here = (channels < NUM_CHANNELS)[:, None] & (places < WIDTH)[None, :]
    end = tl.load(token_starts_ptr + part + 1)
    seq = tl.load(seqs_ptr + end - 1)
    first = tl.load(token_starts_ptr + tl.load(part_starts_ptr + seq))
    oldest = first - WIDTH * (1 - tl.load(is_new_ptr + seq).to(tl.int32))
    sources = end - WIDTH + places
    given = tl.load(
        inputs_ptr + sources.to(tl.int64)[None, :] * inputs_stride_token + channels[:, None],
        mask=is_here & (sources >= first)[None, :],
        other=0.0,
    )
    before = (seq.to(tl.int64) * NUM_CHANNELS + channels)[:, None] * WIDTH + (sources - first + WIDTH)[None, :]
    is_kept = (sources >= oldest) & (sources < first)
    kept = tl.load(before_ptr + before, mask=is_here & is_kept[None, :], other=0.0)
    block = tl.load(write_ptr + part) * pool_stride_block
    tl.store(pool_ptr + block + channels[:, None] * WIDTH + places[None, :], given + kept, mask=is_here)


def causal_convolution(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, pool: torch.Tensor, states: RaggedStates
) -> torch.Tensor:
    """`silu` of `bias` and the sum of the sequence's last inputs times `weight`, for each token and channel; and the states in the
    pool.

    Args:
        inputs: `[num_tokens, num_channels]`, may be strided between tokens.
        weight: `[num_channels, width]`, contiguous; the last column is the token's own.
        bias: `[num_channels]`, or None.
        pool: `[num_blocks, num_channels, width]`, states, the last input last; may be strided between blocks.
        states: where they are. States behind each part are written.

    Returns `[num_tokens, num_channels]`, contiguous, in the dtype of `inputs`, to which sums are rounded before `silu`.

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    require_shape("inputs", inputs, (states.num_tokens, "num_channels"))
    num_channels = inputs.shape[1]
    require_shape("weight", weight, (num_channels, "width"))
    width = weight.shape[1]
    require_shape("pool", pool, ("num_blocks", num_channels, width))
    require_dtype("inputs", inputs, *FLOAT_DTYPES)
    require_dtype("weight", weight, *FLOAT_DTYPES)
    require_dtype("pool", pool, inputs.dtype)
    if bias is not None:
        require_shape("bias", bias, (num_channels,))
        require_dtype("bias", bias, *FLOAT_DTYPES)
        require_unit_stride("bias", bias)
    require_unit_stride("inputs", inputs)
    if not weight.is_contiguous() or pool.stride()[1:] != (width, 1):
        raise ValueError(
            f"weight and pool have strides {weight.stride()} and {pool.stride()}, expected contiguous rows"
        )
    states.require()
    out = torch.empty((states.num_tokens, num_channels), dtype=inputs.dtype, device=inputs.device)
    before = pool[states.read]
    tiles = triton.cdiv(num_channels, _CHANNELS)
    numbers = states.seqs, states.token_starts, states.part_starts, states.is_new.view(torch.uint8)
    _convolution_kernel[(triton.cdiv(states.num_tokens, _TOKENS), tiles)](
        *(inputs, weight, bias, before, out, *numbers, states.num_tokens, inputs.stride(0)),
        NUM_CHANNELS=num_channels,
        WIDTH=width,
        TOKENS=_TOKENS,
        CHANNELS=_CHANNELS,
        num_warps=4,
    )
    _keep_inputs_kernel[(states.num_parts, tiles)](
        *(inputs, before, pool, *numbers, states.write, inputs.stride(0), pool.stride(0)),
        NUM_CHANNELS=num_channels,
        WIDTH=width,
        WIDTH_PAD=next_power_of_2(width),
        CHANNELS=_CHANNELS,
        num_warps=1,
    )
    return out
