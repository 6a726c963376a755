"""The tiles of prefill attention, and how their keys and values are loaded.

Pure functions of shapes and of the device's compute capability. So the decisions for a GPU can be tested without one. Do not launch
these; `prefill_attention` does.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from kvrelay.kernels.checks import FP8_DTYPE, PagedKv, next_power_of_2

_HOPPER = (9, 0)  # the first architecture with a tensor memory accelerator
_BLACKWELL = (10, 0)
_BOX_DTYPES = (torch.float16, torch.bfloat16, FP8_DTYPE)
# Over fp8 256 dimensions and Triton 3.6 104 bytes spill on sm_90.
_MAX_FP8_HEAD_DIM = 128
_MAX_BOX_DIM = 256  # TMA's limit for the numbers of a row


@dataclass(frozen=True)
class Tile:
    """Launch parameters. The compile check requires its specialisations not to spill (from Triton 3.9 on).

    Some others are known to spill, at most 92 bytes per thread: bf16 with head_dim 128 and group 7 or 32 on sm80 (half the rows
    avoid it for 7; the speed is not measured), and fp32 with head_dim 256 on gfx942. With fp32 and head_dim 512, up to 32 bytes
    spill on NVIDIA GPUs and 176 on gfx942; there decode attention spills 464.
    """

    rows: int  # (query token, head of the group) pairs per program
    keys: int  # keys per iteration
    num_warps: int
    num_stages: int


class TileLoads(enum.Enum):
    """How keys and values get to shared memory if all keys of a tile are visible. Masked tiles are always loaded by pointers."""

    POINTERS = enum.auto()  # 16 bytes per thread and instruction, from any address
    BOXES = enum.auto()  # a tile is one box of neighbouring rows, copied by one instruction (TMA)


def choose_tile(
    head_dim_pad: int,
    element_size: int,
    *,
    is_chunked: bool = False,
    sees_ahead: bool = False,
    is_roomy: bool = False,
) -> Tile:
    """The tile for a padded head_dim and the size of a pool's number in bytes.

    ``is_chunked``: queries see only their own chunk. ``sees_ahead``: queries see later keys, too. ``is_roomy``: see
    `has_much_shared_memory`.
    """
    if head_dim_pad > _MAX_BOX_DIM:
        # With 32 rows and 4 warps 16 bytes spill on sm_90 and sm_100; with 8 warps two buffers do not fit gfx942.
        is_wide = element_size == 4
        return Tile(rows=16, keys=16, num_warps=8 if is_wide else 4, num_stages=1 if is_wide else 2)
    if element_size == 4:
        return Tile(rows=32 if head_dim_pad <= 128 else 16, keys=32, num_warps=8, num_stages=1)
    if head_dim_pad <= 64:
        return Tile(rows=64, keys=64, num_warps=4, num_stages=3)
    if head_dim_pad == 128:
        # With chunks each row has its own limit in a register: with 128 rows 72 bytes spill on sm_80, 8 on gfx942. With a window
        # and keys ahead, 56 spill on sm_80, none on Hopper.
        is_small = is_chunked or (sees_ahead and not is_roomy)
        # Three buffers of keys and values are worth 18 % on an H200.
        stages = 3 if is_roomy and element_size == 2 and not is_chunked else 2
        return Tile(rows=64 if is_small else 128, keys=64, num_warps=8, num_stages=stages)
    return Tile(rows=64, keys=32, num_warps=8, num_stages=2)


def nvidia_capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of an NVIDIA GPU; None for other devices."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)


def has_much_shared_memory(capability: tuple[int, int] | None) -> bool:
    """Whether a program has room for three buffers: on NVIDIA's data-centre GPUs from Hopper on. On an A100 it would spill."""
    return capability is not None and capability[0] in (9, 10)


def looks_ahead(device: torch.device) -> bool:
    """Whether block ids are loaded one iteration early. Not before Hopper, where the kernel would spill."""
    capability = nvidia_capability(device)
    return capability is None or capability >= _HOPPER


def tile_loads(capability: tuple[int, int] | None, pool: torch.Tensor | PagedKv, *, has_window: bool) -> TileLoads:
    """How prefill attention loads tiles of `pool` on a device of that compute capability (None: no NVIDIA GPU)."""
    if (
        isinstance(pool, PagedKv)
        or capability is None
        or capability < _HOPPER
        or box_obstacle(pool, has_window=has_window) is not None
    ):
        return TileLoads.POINTERS
    # There boxes spill 8 bytes (Triton 3.9).
    spills = capability >= _BLACKWELL and pool.shape[5] == 64 and pool.dtype != FP8_DTYPE
    return TileLoads.POINTERS if spills else TileLoads.BOXES


def box_obstacle(pool: torch.Tensor | PagedKv, *, has_window: bool) -> str | None:
    """Why tiles of a pool cannot be loaded as boxes on any device; None if they can. Reads only shape and dtype.

    Args:
        pool: `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, contiguous.
        has_window: queries see only a window, or their chunk; then all tiles are masked.
    """
    if isinstance(pool, PagedKv):
        return "layers of unequal sizes"
    *_, block_size, head_dim = pool.shape
    keys = choose_tile(next_power_of_2(head_dim), pool.element_size()).keys
    obstacle = None
    if pool.dtype not in _BOX_DTYPES:
        obstacle = f"numbers of {pool.dtype}"
    elif has_window:
        obstacle = "a window"
    elif head_dim != next_power_of_2(head_dim):
        obstacle = f"a head_dim of {head_dim}, which is no power of two"
    elif head_dim > _MAX_BOX_DIM:
        obstacle = f"a head_dim of {head_dim}; a box has {_MAX_BOX_DIM} numbers a row at most"
    elif pool.dtype == FP8_DTYPE and head_dim > _MAX_FP8_HEAD_DIM:
        obstacle = f"a head_dim of {head_dim} over {pool.dtype}"
    elif block_size % keys:
        obstacle = f"blocks of {block_size} tokens under tiles of {keys}"
    elif (num_rows := pool.numel() // head_dim) >= 2**31:
        obstacle = f"{num_rows} rows, which 31 bits do not count"
    return obstacle


def layer_boxes(layer_pool: torch.Tensor) -> TensorDescriptor:
    """One layer's keys and values as rows of head_dim numbers, from which boxes of a tile's keys are loaded.

    Sets attributes without calling the device: the launch encodes the descriptor (`CUtensorMap`) and passes it by value.

    Args:
        layer_pool: `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, `pool[:, layer]` of a contiguous pool without a
            `box_obstacle`. Rows count from its first row, across the other layers, to the layer's last row in the last block.
    """
    num_blocks, _, num_kv_heads, block_size, head_dim = layer_pool.shape
    num_rows = (num_blocks - 1) * (layer_pool.stride(0) // head_dim) + 2 * num_kv_heads * block_size
    keys = choose_tile(next_power_of_2(head_dim), layer_pool.element_size()).keys
    return TensorDescriptor(layer_pool, [num_rows, head_dim], [head_dim, 1], [keys, head_dim])
