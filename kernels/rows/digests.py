"""XXH3-64 of the stretches of a KV block, on the device that holds the block.

A block's checksum on the wire is made of these digests, so the host need not read the block. The algorithm is XXH3's for more than
240 bytes, with the default secret and seed 0 (xxhash_spec.md in github.com/Cyan4973/xxHash). It reads stripes of 64 bytes; 16 of
them are a row here. All products are independent, and only eight accumulators go from row to row.

A program is one warp and has one stretch, so that sums over stripes and rows stay within the warp.
"""

from __future__ import annotations

import functools
import struct
from typing import no_type_check

import torch
import triton
import triton.language as tl

from kvrelay.kernels.checks import require_dtype, require_shape

_WORD_NBYTES = 8
_MIN_WORDS = 31  # shorter inputs have other algorithms
_ROWS = 8  # read together
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32_1 = tl.constexpr(0x9E3779B1)
_PRIME64_1 = tl.constexpr(0x9E3779B185EBCA87)
_PRIME_MX1 = tl.constexpr(0x165667919E3779F9)
# Before the first stripe: of 32-bit primes 3, 2, 1 and 64-bit primes 1 to 5.
_ACCUMULATORS = (
    *(0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9),
    *(0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1),
)
# In the table of a device, in words. Stripe n of a row takes the eight from n on; the row's scrambling takes those from 16 on.
_LAST_STRIPE = tl.constexpr(24)
_MERGE = tl.constexpr(32)
_START = tl.constexpr(40)


def is_digestible(nbytes: int) -> bool:
    """Whether a block of so many bytes can be given to `block_digests`."""
    return nbytes % _WORD_NBYTES == 0 and nbytes >= _MIN_WORDS * _WORD_NBYTES


def block_digests(
    blocks: torch.Tensor, block_ids: torch.Tensor, nbytes: int, stretch_nbytes: int, digests: torch.Tensor
) -> None:
    """Write the XXH3-64 of each stretch of the first `nbytes` bytes of some blocks into `digests`, without waiting.

    `blocks`: `[num_blocks, block_nbytes]` uint8, contiguous and aligned to 8 bytes. `block_ids`: `[n]` int64. `digests`:
    `[n, num_stretches]` int64, with the bits of the unsigned digests. Both are contiguous, on the same device or in pinned memory,
    and in use until the kernel is over. Stretches have `stretch_nbytes`, and the last has the rest, too. Raises ValueError unless
    `is_digestible(nbytes)`.
    """
    require_shape("blocks", blocks, ["num_blocks", "block_nbytes"])
    require_dtype("blocks", blocks, torch.uint8)
    require_shape("block_ids", block_ids, ["n"])
    require_dtype("block_ids", block_ids, torch.int64)
    require_dtype("digests", digests, torch.int64)
    num_stretches = max(1, nbytes // stretch_nbytes)
    require_shape("digests", digests, [len(block_ids), num_stretches])
    if not is_digestible(nbytes) or nbytes > blocks.shape[1]:
        raise ValueError(
            f"{nbytes} bytes of a block of {blocks.shape[1]} cannot be hashed in words of {_WORD_NBYTES} bytes"
        )
    _digest_kernel[(num_stretches, len(block_ids))](
        blocks.view(torch.int64),
        _table(blocks.device),
        block_ids,
        digests,
        blocks.shape[1] // _WORD_NBYTES,
        nbytes // _WORD_NBYTES,
        STRETCH_WORDS=stretch_nbytes // _WORD_NBYTES,
        ROWS=_ROWS,
        num_warps=1,
    )


@functools.cache
def _table(device: torch.device) -> torch.Tensor:
    """Secret and first accumulators as words, on the device."""
    pieces = (_SECRET, _SECRET[121:185], _SECRET[11:75], struct.pack("<8Q", *_ACCUMULATORS))
    return torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.int64).to(device)


# One compilation serves all: sizes are not specialised, nor how many blocks there are, by which numbers and digests are aligned.
@triton.jit(
    do_not_specialize=["block_words", "num_words"], do_not_specialize_on_alignment=["block_ids_ptr", "digests_ptr"]
)
@no_type_check
def _digest_kernel(
    words_ptr,
    table_ptr,
    block_ids_ptr,
    digests_ptr,
    block_words,
    num_words,
    STRETCH_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program for each stretch of each block. The last one has the rest of the block, too."""
    stretch, block = tl.program_id(0), tl.program_id(1)
    is_last = stretch == tl.num_programs(0) - 1
    length = tl.where(is_last, num_words - stretch * STRETCH_WORDS, STRETCH_WORDS)
    words_ptr += tl.load(block_ids_ptr + block) * block_words + stretch * STRETCH_WORDS
    row = tl.arange(0, ROWS)
    stripe = tl.arange(0, 16)
    lane = tl.arange(0, 8)
    in_row = stripe[:, None] * 8 + lane[None, :]
    secret = tl.load(table_ptr + stripe[:, None] + lane[None, :]).to(tl.uint64, bitcast=True)
    scramble = tl.load(table_ptr + 16 + lane).to(tl.uint64, bitcast=True)
    accumulators = tl.load(table_ptr + _START + lane).to(tl.uint64, bitcast=True)

    num_rows = (length - 1) // 128
    for first in range(0, num_rows, ROWS):
        is_there = first + row < num_rows
        offsets = (first + row)[:, None, None] * 128 + in_row[None, :, :]
        words = tl.load(words_ptr + offsets, mask=is_there[:, None, None], other=0).to(tl.uint64, bitcast=True)
        sums = tl.sum(_products(words, secret[None, :, :]), axis=1) + _swapped(tl.sum(words, axis=1))  # [ROWS, 8]
        for number in tl.static_range(ROWS):
            its = tl.sum(tl.where(row[:, None] == number, sums, 0), axis=0)
            mixed = accumulators + its
            mixed = (mixed ^ (mixed >> 47) ^ scramble) * _PRIME32_1
            accumulators = tl.where(first + number < num_rows, mixed, accumulators)

    # The rest of less than a row, in whole stripes; then the last stripe, which may read words a second time.
    num_stripes = (length - 1 - num_rows * 128) // 8
    mask = (stripe < num_stripes)[:, None]
    words = tl.load(words_ptr + num_rows * 128 + in_row, mask=mask, other=0).to(tl.uint64, bitcast=True)
    products = tl.where(mask, _products(words, secret), 0)
    last = tl.load(words_ptr + length - 8 + lane).to(tl.uint64, bitcast=True)
    last_secret = tl.load(table_ptr + _LAST_STRIPE + lane).to(tl.uint64, bitcast=True)
    accumulators += tl.sum(products, axis=0) + _products(last, last_secret)
    accumulators += _swapped((tl.sum(words, axis=0) + last)[None, :]).reshape(8)

    merged = accumulators ^ tl.load(table_ptr + _MERGE + lane).to(tl.uint64, bitcast=True)
    low, high = tl.split(merged.reshape(4, 2))
    digest = length.to(tl.uint64) * 8 * _PRIME64_1 + tl.sum((low * high) ^ tl.umulhi(low, high), axis=0)
    digest = (digest ^ (digest >> 37)) * _PRIME_MX1
    digest = digest ^ (digest >> 32)
    tl.store(digests_ptr + block * tl.num_programs(0) + stretch, digest.to(tl.int64, bitcast=True))


@triton.jit
@no_type_check
def _products(words, secret):
    """Of both halves of each word."""
    keyed = words ^ secret
    return (keyed & 0xFFFFFFFF) * (keyed >> 32)


@triton.jit
@no_type_check
def _swapped(sums):
    """`[n, 8]` with neighbouring lanes exchanged: a word goes to its neighbour's accumulator."""
    even, odd = tl.split(sums.reshape(sums.shape[0], 4, 2))
    return tl.join(odd, even).reshape(sums.shape[0], 8)
