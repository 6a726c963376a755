"""Argument checks shared by the kernel wrappers, and the geometry of the paged KV pool.

A wrapper checks only shapes, dtypes and strides, because reading values would synchronise with the device. Not for user input: a
failure here is a bug in the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FP8_DTYPE = torch.float8_e4m3fn
BLOCK_SIZES = (8, 16, 32, 64)
MAX_HEAD_DIM = 512
_MAX_FP8_HEAD_DIM = 256  # larger heads have no kernel that loads e4m3 numbers 16 bytes at a time


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= n (n >= 1)."""
    return 1 << (n - 1).bit_length()


def require_shape(name: str, tensor: torch.Tensor, expected: Sequence[int | str]) -> None:
    """Raise ValueError unless `tensor` has the expected shape; a string names an unconstrained dimension."""
    matches = tensor.dim() == len(expected) and all(
        isinstance(want, str) or have == want for have, want in zip(tensor.shape, expected, strict=True)
    )
    if not matches:
        wanted = ", ".join(str(want) for want in expected)
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected [{wanted}]")


def require_dtype(name: str, tensor: torch.Tensor, *allowed: torch.dtype) -> None:
    """Raise ValueError unless the dtype of `tensor` is one of `allowed`."""
    if tensor.dtype not in allowed:
        raise ValueError(f"{name} has dtype {tensor.dtype}, expected {' or '.join(map(str, allowed))}")


def require_unit_stride(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless the last dimension of `tensor` has stride 1."""
    if tensor.stride(-1) != 1:
        raise ValueError(f"{name} has last stride {tensor.stride(-1)}, expected 1")


def require_int32(**tensors: torch.Tensor) -> None:
    """Raise ValueError unless all `tensors` (by their names in messages) are int32, with a last stride of 1."""
    for name, tensor in tensors.items():
        require_dtype(name, tensor, torch.int32)
        require_unit_stride(name, tensor)


@dataclass(frozen=True)
class PagedKv:
    """Keys and values as two views of one pool, for keys and values of unequal size, or groups of different sizes in the same
    blocks.

    A block consists of layers. Each layer has all heads' keys, then all heads' values.
    """

    keys: torch.Tensor  # [num_blocks, num_layers, num_kv_heads, block_size, key_size]
    values: torch.Tensor  # [num_blocks, num_layers, num_kv_heads, block_size, value_size]

    @classmethod
    def of(cls, pool: torch.Tensor | PagedKv) -> PagedKv:
        """Views of a pool tensor `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`. Returns a PagedKv unchanged."""
        return pool if isinstance(pool, PagedKv) else cls(pool[:, :, 0], pool[:, :, 1])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values."""
        return self.keys.dtype

    @property
    def value_start(self) -> int:
        """Elements from a layer's first key to its first value."""
        return int(self.values.storage_offset() - self.keys.storage_offset())


@dataclass(frozen=True)
class PoolGeometry:
    """The constants of a pool: a PagedKv, or a tensor `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`."""

    num_kv_heads: int
    block_size: int  # tokens per block
    head_dim: int  # of keys
    value_dim: int

    @classmethod
    def of(cls, pool: torch.Tensor | PagedKv, layer: int) -> PoolGeometry:
        """Check `pool` and `layer`.

        Raises:
            ValueError: wrong rank, dtype, block size or head_dim, not contiguous, or no such layer.
        """
        if isinstance(pool, PagedKv):
            return cls._of_views(pool, layer)
        require_shape("pool", pool, ("num_blocks", "num_layers", 2, "num_kv_heads", "block_size", "head_dim"))
        require_dtype("pool", pool, *FLOAT_DTYPES, FP8_DTYPE)
        num_layers, (num_kv_heads, block_size, head_dim) = pool.shape[1], pool.shape[3:]
        if not pool.is_contiguous():
            raise ValueError(f"pool has strides {pool.stride()}, expected a contiguous tensor")
        if pool.dtype == FP8_DTYPE and head_dim > _MAX_FP8_HEAD_DIM:
            raise ValueError(f"head_dim is {head_dim} over {FP8_DTYPE}, expected at most {_MAX_FP8_HEAD_DIM}")
        return cls._checked(num_layers, layer, num_kv_heads, block_size, head_dim, head_dim)

    @classmethod
    def _of_views(cls, pool: PagedKv, layer: int) -> PoolGeometry:
        sizes = []
        for name, view in (("keys", pool.keys), ("values", pool.values)):
            require_shape(name, view, (*pool.keys.shape[:4], "size"))
            require_dtype(name, view, *FLOAT_DTYPES)
            block_size, size = view.shape[3:]
            if view.stride()[2:] != (block_size * size, size, 1) or view.stride()[:2] != pool.keys.stride()[:2]:
                raise ValueError(
                    f"{name} have strides {view.stride()}, expected heads that lie together, as the pool's keys do"
                )
            sizes.append(size)
        num_layers, num_kv_heads, block_size = pool.keys.shape[1:4]
        return cls._checked(num_layers, layer, num_kv_heads, block_size, *sizes)

    @classmethod
    def _checked(
        cls, num_layers: int, layer: int, num_kv_heads: int, block_size: int, head_dim: int, value_dim: int
    ) -> PoolGeometry:
        if block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size is {block_size}, expected one of {BLOCK_SIZES}")
        for size in (head_dim, value_dim):
            if size % 16 or not 16 <= size <= MAX_HEAD_DIM:
                raise ValueError(f"head_dim is {size}, expected a multiple of 16 up to {MAX_HEAD_DIM}")
        if not 0 <= layer < num_layers:
            raise ValueError(f"layer is {layer}, expected 0 <= layer < {num_layers}")
        return cls(num_kv_heads, block_size, head_dim, value_dim)

    def group_size(self, num_q_heads: int) -> int:
        """Query heads per KV head.

        Raises:
            ValueError: num_q_heads is not a positive multiple of num_kv_heads.
        """
        if num_q_heads < 1 or num_q_heads % self.num_kv_heads:
            raise ValueError(f"num_q_heads is {num_q_heads}, expected a multiple of {self.num_kv_heads}")
        return num_q_heads // self.num_kv_heads


def require_window(sliding_window: int | None, chunk_size: int | None = None) -> None:
    """Raise ValueError unless each argument is None or at least 1, and at least one is None."""
    for name, size in (("sliding_window", sliding_window), ("chunk_size", chunk_size)):
        if size is not None and size < 1:
            raise ValueError(f"{name} is {size}, expected None or >= 1")
    if sliding_window is not None and chunk_size is not None:
        raise ValueError(
            f"sliding_window is {sliding_window} and chunk_size {chunk_size}, expected one of them at most"
        )


def require_scores(num_q_heads: int, softcap: float | None, sinks: torch.Tensor | None) -> None:
    """Raise ValueError unless `softcap` is None or positive, and `sinks` is None or contiguous floats `[num_q_heads]`."""
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}, expected None or a number above 0")
    if sinks is not None:
        require_shape("sinks", sinks, (num_q_heads,))
        require_dtype("sinks", sinks, *FLOAT_DTYPES)
        require_unit_stride("sinks", sinks)
