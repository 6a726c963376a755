"""What prefill attention is cut into, and how its tiles of keys and values are loaded.

Pure functions of shapes and of the device's compute capability, so that what a GPU would do is decided, and tested, without
one. Not for launching: `prefill_attention` does that.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from kvrelay.kernels.checks import FP8_DTYPE, PagedKv, next_power_of_2

_HOPPER = (9, 0)  # the first with a tensor memory accelerator
_BLACKWELL = (10, 0)
_BOX_DTYPES = (torch.float16, torch.bfloat16, FP8_DTYPE)
# Over fp8 256 dimensions and Triton 3.6 104 bytes spill on sm_90.
_MAX_FP8_HEAD_DIM = 128
_MAX_BOX_DIM = 256  # numbers of a row, by TMA


@dataclass(frozen=True)
class Tile:
    """Launch parameters; the compile check holds its specialisations to no spills (from Triton 3.9 on).

    Outside of it some are known to spill, at most 92 bytes per thread: bf16, head_dim 128, group 7 or 32 on
    sm80 (half the rows avoid it for 7; their speed is not measured), and fp32, head_dim 256 on gfx942. Of fp32
    with head_dim 512 up to 32 bytes do on NVIDIA's, 176 on gfx942, and 464 of decode attention there.
    """

    rows: int  # (query token, head of the group) pairs per program
    keys: int  # keys per iteration
    num_warps: int
    num_stages: int


class TileLoads(enum.Enum):
    """How keys and values reach shared memory where every key of a tile is visible; masked tiles are loaded by pointers."""

    POINTERS = enum.auto()  # 16 bytes per thread and instruction, from wherever they lie
    BOXES = enum.auto()  # a tile is one box of neighbouring rows, which one instruction copies (TMA)


def choose_tile(head_dim_pad: int, element_size: int, *, is_chunked: bool = False) -> Tile:
    """The tile for a padded head_dim and the bytes of a pool's number. ``is_chunked``: queries see their own chunk only."""
    if head_dim_pad > _MAX_BOX_DIM:
        # With 32 rows and 4 warps 16 bytes spill on sm_90 and sm_100; with 8 warps two buffers do not fit gfx942.
        is_wide = element_size == 4
        return Tile(rows=16, keys=16, num_warps=8 if is_wide else 4, num_stages=1 if is_wide else 2)
    if element_size == 4:
        return Tile(rows=32 if head_dim_pad <= 128 else 16, keys=32, num_warps=8, num_stages=1)
    if head_dim_pad <= 64:
        return Tile(rows=64, keys=64, num_warps=4, num_stages=3)
    if head_dim_pad == 128:
        # Of chunks each row has a limit of its own, in registers: with 128 rows 72 bytes spill on sm_80, 8 on gfx942.
        return Tile(rows=64 if is_chunked else 128, keys=64, num_warps=8, num_stages=2)
    return Tile(rows=64, keys=32, num_warps=8, num_stages=2)


def nvidia_capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of an NVIDIA GPU; None of any other device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)


def looks_ahead(device: torch.device) -> bool:
    """Whether block ids are loaded an iteration before they are needed: not before Hopper, where it makes the kernel spill."""
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
    # There 8 bytes spill (Triton 3.9).
    spills = capability >= _BLACKWELL and pool.shape[5] == 64 and pool.dtype != FP8_DTYPE
    return TileLoads.POINTERS if spills else TileLoads.BOXES


def box_obstacle(pool: torch.Tensor | PagedKv, *, has_window: bool) -> str | None:
    """Why tiles of a pool cannot be loaded as boxes, whatever the device; None if they can. Reads shape and dtype only.

    Args:
        pool: `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, contiguous.
        has_window: queries see a window, or their chunk, only; then all tiles are masked.
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

    Only attributes, no call of the device: the launch encodes it (`CUtensorMap`) and passes it as an argument, by value.

    Args:
        layer_pool: `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, `pool[:, layer]` of a contiguous pool without a
            `box_obstacle`. Rows are counted from its first on and reach over the other layers, to the last block's last row of it.
    """
    num_blocks, _, num_kv_heads, block_size, head_dim = layer_pool.shape
    num_rows = (num_blocks - 1) * (layer_pool.stride(0) // head_dim) + 2 * num_kv_heads * block_size
    keys = choose_tile(next_power_of_2(head_dim), layer_pool.element_size()).keys
    return TensorDescriptor(layer_pool, [num_rows, head_dim], [head_dim, 1], [keys, head_dim])
