"""Rotary embedding and KV write: bit-exact copies, strided qkv, untouched slots, large offsets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvrelay.kernels.attention.rotary import rotary_kv_write, rotary_kv_write_reference, rotary_reference
from tests.kernels.conftest import DTYPES

Randn = Callable[..., torch.Tensor]


def _tables(max_positions: int, rotary_size: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    inverse = 10000.0 ** (-torch.arange(0, rotary_size, 2, device=device) / rotary_size)
    angles = torch.arange(max_positions, device=device)[:, None] * inverse
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim", "rotary_size", "block_size"),
    [(9, 3, 64, 64, 16), (4, 4, 48, 48, 8), (5, 1, 128, 128, 32), (6, 2, 128, 64, 16), (4, 2, 80, 24, 8)],
)
def test_rotary_kv_write(
    device: str,
    randn: Randn,
    assert_close: Callable[[torch.Tensor, torch.Tensor], None],
    dtype: torch.dtype,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_size: int,
    block_size: int,
) -> None:
    cos, sin = _tables(40, rotary_size, device)
    qkv = randn(5, num_q_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    q, k, v = qkv.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    before = qkv.clone()
    positions = torch.tensor([0, 7, 39, 3, 1], device=device)
    slots = torch.tensor([0, 4 * block_size - 1, 2 * block_size + 3, block_size, 1], device=device)
    pool = randn(4, 3, 2, num_kv_heads, block_size, head_dim, dtype=dtype)
    expected_pool, expected_q = pool.clone(), before[:, :num_q_heads].clone()
    rotary_kv_write_reference(expected_q, k, v, cos, sin, positions, expected_pool, 1, slots)

    rotary_kv_write(q, k, v, cos, sin, positions, pool, 1, slots)

    exact = before.double()
    assert_close(q, rotary_reference(exact[:, :num_q_heads], cos.double(), sin.double(), positions))
    assert torch.equal(qkv[:, num_q_heads:], before[:, num_q_heads:])
    block_ids, offsets = slots // block_size, slots % block_size
    assert torch.equal(pool[block_ids, 1, 1, :, offsets], v)
    assert_close(
        pool[block_ids, 1, 0, :, offsets],
        rotary_reference(exact[:, num_q_heads : num_q_heads + num_kv_heads], cos, sin, positions),
    )
    assert torch.equal(q[..., rotary_size:], before[:, :num_q_heads, rotary_size:])
    # Apart from the written slots, the pool is bit-identical to the reference's.
    for tensor in (pool, expected_pool):
        tensor[block_ids, 1, :, :, offsets] = 0
    assert torch.equal(pool, expected_pool)


@pytest.mark.parametrize(("dtype", "rotary_size"), [(torch.float32, 64), (torch.bfloat16, 64), (torch.bfloat16, 32)])
def test_an_fp8_pool_gets_what_the_reference_rounds_to(
    device: str, randn: Randn, dtype: torch.dtype, rotary_size: int
) -> None:
    """Values are bit-identical, with a scale for each head, and saturated where too large."""
    cos, sin = _tables(40, rotary_size, device)
    q, k, v = (randn(5, heads, 64, dtype=dtype) for heads in (4, 2, 2))
    v[0, 0, 0], v[1, 1, 63] = 1e6, -1e6
    positions = torch.tensor([0, 7, 39, 3, 1], device=device)
    slots = torch.tensor([0, 31, 19, 8, 1], device=device)
    scales = torch.tensor([[[9.0, 9.0], [9.0, 9.0]], [[0.01, 0.3], [2.0, 0.002]]], device=device)
    pools = [torch.zeros(4, 2, 2, 2, 8, 64, dtype=torch.float8_e4m3fn, device=device) for _ in range(2)]
    queries = [q.clone(), q.clone()]
    rotary_kv_write(queries[0], k, v, cos, sin, positions, pools[0], 1, slots, scales)
    rotary_kv_write_reference(queries[1], k, v, cos, sin, positions, pools[1], 1, slots, scales)
    torch.testing.assert_close(*queries)
    written, expected = (pool.float() for pool in pools)
    assert torch.equal(written[:, 0], expected[:, 0])
    assert torch.equal(written[:, 1, 1], expected[:, 1, 1])
    # A key's rotation may differ in its last bit, and so round to the next of 8 steps per power of two.
    torch.testing.assert_close(written[:, 1, 0], expected[:, 1, 0], rtol=0.13, atol=2**-9)
    assert (written[:, 1, 0] != expected[:, 1, 0]).sum() <= 4
    assert written[0, 1, 1, 0, 0, 0] == 448
    assert written[3, 1, 1, 1, 7, 63] == -448
    assert written.abs().sum(5).gt(0).sum() == 5 * 2 * 2


def test_position_zero_is_bit_exact(device: str, randn: Randn) -> None:
    cos, sin = _tables(1, 64, device)
    q, k, v = (randn(1, 2, 64, dtype=torch.bfloat16) for _ in range(3))
    before = q.clone()
    pool = randn(1, 1, 2, 2, 8, 64, dtype=torch.bfloat16)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    rotary_kv_write(q, k, v, cos, sin, zero, pool, 0, zero)
    assert torch.equal(q, before)
    assert torch.equal(pool[0, 0, 0, :, 0], k[0])


def test_offsets_beyond_31_bits(device: str, randn: Randn) -> None:
    """The last of 2**20 blocks of 2048 elements start past 2**31 elements. Untouched pages take no memory."""
    pool = torch.empty((2**20 + 2, 1, 2, 1, 16, 64), dtype=torch.bfloat16, device=device)
    cos, sin = _tables(1, 64, device)
    q, k, v = (randn(1, 1, 64, dtype=torch.bfloat16) for _ in range(3))
    position = torch.zeros(1, dtype=torch.int64, device=device)
    slot = torch.tensor([(2**20 + 1) * 16 + 5], device=device)
    rotary_kv_write(q, k, v, cos, sin, position, pool, 0, slot)
    assert torch.equal(pool[2**20 + 1, 0, 0, :, 5], k[0])
    assert torch.equal(pool[2**20 + 1, 0, 1, :, 5], v[0])


def test_wrong_arguments_are_refused(device: str, randn: Randn) -> None:
    cos, sin = _tables(4, 64, device)
    pool, x = randn(2, 1, 2, 2, 8, 64), randn(3, 2, 64)
    ids = torch.arange(3, device=device)
    with pytest.raises(ValueError, match=r"v has shape \(3, 1, 64\)"):
        rotary_kv_write(x, x, x[:, :1], cos, sin, ids, pool, 0, ids)
    with pytest.raises(ValueError, match="k has dtype"):
        rotary_kv_write(x, x.half(), x, cos, sin, ids, pool, 0, ids)
    with pytest.raises(ValueError, match="positions has dtype"):
        rotary_kv_write(x, x, x, cos, sin, ids.int(), pool, 0, ids)
    with pytest.raises(ValueError, match="cos has dtype"):
        rotary_kv_write(x, x, x, cos.half(), sin, ids, pool, 0, ids)
    wide = _tables(4, 128, device)
    with pytest.raises(ValueError, match=r"cos has shape .* expected angles for 2 to 64 dimensions"):
        rotary_kv_write(x, x, x, *wide, ids, pool, 0, ids)
    with pytest.raises(ValueError, match=r"slot_mapping has shape \(2,\)"):
        rotary_kv_write(x, x, x, cos, sin, ids, pool, 0, ids[:2])
