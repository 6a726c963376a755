"""Rotary embedding of q and k, fused with writing k and v into the paged pool.

Half-split ("neox") rotation as in Llama: dimension i is rotated with dimension i + rotary_size/2. Dimensions from rotary_size on
stay as they are (partial rotation, as in GLM-4.5). The caller owns the cos/sin tables, which may follow any rope scaling.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl

from kvrelay.kernels.attention.kv_scales import FP8_MAX, quantise, require_compute_dtype
from kvrelay.kernels.checks import (
    PoolGeometry,
    next_power_of_2,
    require_dtype,
    require_shape,
    require_unit_stride,
)

_FP8_MAX = tl.constexpr(FP8_MAX)


def rotary_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotates `x [num_tokens, heads, head_dim]` in at least fp32 and rounds once; returns a new tensor."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    half = cos.shape[-1]
    first, second, rest = wide.split_with_sizes((half, half, x.shape[-1] - 2 * half), dim=-1)
    c, s = cos[positions][:, None, :], sin[positions][:, None, :]
    return torch.cat((first * c - second * s, second * c + first * s, rest), dim=-1).to(x.dtype)


def rotary_kv_write_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """The same as `rotary_kv_write`, in torch operations."""
    block_size = pool.shape[4]
    block_ids, offsets = slot_mapping // block_size, slot_mapping % block_size
    for kind, values in enumerate((rotary_reference(k, cos, sin, positions), v)):
        stored = values if kv_scales is None else quantise(values, kv_scales[layer, kind])
        pool[block_ids, layer, kind, :, offsets] = stored
    q.copy_(rotary_reference(q, cos, sin, positions))


@triton.jit
@no_type_check
def _saturated(values, scale):
    # The division is rounded like the reference's: fp8 is so coarse that a last bit may change the result.
    return tl.minimum(tl.maximum(tl.div_rn(values.to(tl.float32), scale), -_FP8_MAX), _FP8_MAX).to(tl.float8e4nv)


@triton.jit(do_not_specialize_on_alignment=["slot_mapping_ptr"])
@no_type_check
def _rotary_kv_write_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    pool_ptr,
    kv_scales_ptr,
    slot_mapping_ptr,
    q_stride_token,
    q_stride_head,
    k_stride_token,
    k_stride_head,
    v_stride_token,
    v_stride_head,
    pool_stride_block,
    pool_stride_value,
    pool_stride_head,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST: tl.constexpr,
    REST_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    dims = tl.arange(0, HALF_PAD)
    mask = dims < HALF
    group = tl.arange(0, GROUP_PAD)
    heads = kv_head * GROUP + group
    q_ptrs = q_ptr + token * q_stride_token + (heads * q_stride_head)[:, None] + dims[None, :]
    q_mask = (group < GROUP)[:, None] & mask[None, :]
    k_ptrs = k_ptr + token * k_stride_token + kv_head * k_stride_head + dims
    v_ptrs = v_ptr + token * v_stride_token + kv_head * v_stride_head + dims
    # All loads come before the first store: the compiler moves no load over a store, and so would add their latencies.
    q_first = tl.load(q_ptrs, mask=q_mask, other=0.0).to(tl.float32)
    q_second = tl.load(q_ptrs + HALF, mask=q_mask, other=0.0).to(tl.float32)
    k_first = tl.load(k_ptrs, mask=mask, other=0.0).to(tl.float32)
    k_second = tl.load(k_ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
    v_first = tl.load(v_ptrs, mask=mask, other=0.0)
    v_second = tl.load(v_ptrs + HALF, mask=mask, other=0.0)
    if REST > 0:  # dimensions that do not rotate; those of q stay where they are
        others = tl.arange(0, REST_PAD)
        rest_mask = others < REST
        k_rest = tl.load(k_ptr + token * k_stride_token + kv_head * k_stride_head + 2 * HALF + others, mask=rest_mask)
        v_rest = tl.load(v_ptr + token * v_stride_token + kv_head * v_stride_head + 2 * HALF + others, mask=rest_mask)
    slot = tl.load(slot_mapping_ptr + token)
    position = tl.load(positions_ptr + token)
    cos = tl.load(cos_ptr + position * HALF + dims, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + position * HALF + dims, mask=mask, other=0.0)

    q_dtype = q_ptr.dtype.element_ty
    tl.store(q_ptrs, (q_first * cos[None, :] - q_second * sin[None, :]).to(q_dtype), mask=q_mask)
    tl.store(q_ptrs + HALF, (q_second * cos[None, :] + q_first * sin[None, :]).to(q_dtype), mask=q_mask)

    block_offset = (slot // BLOCK_SIZE) * pool_stride_block + kv_head * pool_stride_head
    row_ptr = pool_ptr + block_offset + (slot % BLOCK_SIZE) * (2 * HALF + REST)
    key_ptrs = row_ptr + dims
    value_ptrs = key_ptrs + pool_stride_value
    rotated_first = (k_first * cos - k_second * sin).to(q_dtype)
    rotated_second = (k_second * cos + k_first * sin).to(q_dtype)
    if HAS_SCALES:
        key_scale = tl.load(kv_scales_ptr + kv_head)
        value_scale = tl.load(kv_scales_ptr + NUM_KV_HEADS + kv_head)
        rotated_first, rotated_second = _saturated(rotated_first, key_scale), _saturated(rotated_second, key_scale)
        v_first, v_second = _saturated(v_first, value_scale), _saturated(v_second, value_scale)
        if REST > 0:
            k_rest, v_rest = _saturated(k_rest, key_scale), _saturated(v_rest, value_scale)
    tl.store(key_ptrs, rotated_first, mask=mask)
    tl.store(key_ptrs + HALF, rotated_second, mask=mask)
    tl.store(value_ptrs, v_first, mask=mask)
    tl.store(value_ptrs + HALF, v_second, mask=mask)
    if REST > 0:
        rest_ptrs = row_ptr + 2 * HALF + others
        tl.store(rest_ptrs, k_rest, mask=rest_mask)
        tl.store(rest_ptrs + pool_stride_value, v_rest, mask=rest_mask)


def rotary_kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Rotate q in place. Write rotated k, and v unchanged, to their slots in the pool.

    Over an fp8 pool, k (rotated and rounded to its own dtype) and v are divided by their scales and saturated. Every row is
    written, also padding: give padding rows a slot that is never read. Two rows must not share a slot that is read later.

    Args:
        q: `[num_tokens, num_q_heads, head_dim]`, pool's dtype, any float type over an fp8 pool; overwritten;
            may be a strided view.
        k, v: `[num_tokens, num_kv_heads, head_dim]`, q's dtype; may be strided views; not changed.
        cos, sin: `[max_positions, rotary_size // 2]` fp32, contiguous; rotary_size is even, and at most head_dim.
        positions: `[num_tokens]` int64, each < max_positions (not checked: it is device data).
        pool: `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, layer `layer` is written.
        slot_mapping: `[num_tokens]` int64, block_id * block_size + offset in the block.
        kv_scales: `[num_layers, 2, num_kv_heads]` fp32, positive, for an fp8 pool; else None.

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    geometry = PoolGeometry.of(pool, layer)
    require_shape("q", q, ("num_tokens", "num_q_heads", geometry.head_dim))
    num_tokens, num_q_heads, head_dim = q.shape
    group = geometry.group_size(num_q_heads)
    for name, tensor in (("k", k), ("v", v)):
        require_shape(name, tensor, (num_tokens, geometry.num_kv_heads, head_dim))
    require_compute_dtype(pool, kv_scales, q=q)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        require_dtype(name, tensor, q.dtype)
        require_unit_stride(name, tensor)
    half = cos.shape[-1]
    if not 0 < 2 * half <= head_dim:
        raise ValueError(f"cos has shape {tuple(cos.shape)}, expected angles for 2 to {head_dim} dimensions of a head")
    for name, tensor in (("cos", cos), ("sin", sin)):
        require_shape(name, tensor, (cos.shape[0], half))
        require_dtype(name, tensor, torch.float32)
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}, expected a contiguous tensor")
    for name, tensor in (("positions", positions), ("slot_mapping", slot_mapping)):
        require_shape(name, tensor, (num_tokens,))
        require_dtype(name, tensor, torch.int64)
        require_unit_stride(name, tensor)
    layer_pool = pool[:, layer]
    _rotary_kv_write_kernel[(num_tokens, geometry.num_kv_heads)](
        q,
        k,
        v,
        cos,
        sin,
        positions,
        layer_pool,
        None if kv_scales is None else kv_scales[layer],
        slot_mapping,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        layer_pool.stride(0),
        layer_pool.stride(1),
        layer_pool.stride(2),
        NUM_KV_HEADS=geometry.num_kv_heads,
        GROUP=group,
        GROUP_PAD=next_power_of_2(group),
        HALF=half,
        HALF_PAD=next_power_of_2(half),
        REST=head_dim - 2 * half,
        REST_PAD=next_power_of_2(max(head_dim - 2 * half, 1)),
        BLOCK_SIZE=geometry.block_size,
        HAS_SCALES=kv_scales is not None,
        num_warps=1,
    )
