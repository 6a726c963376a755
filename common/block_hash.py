"""Chained block hashes: the prefix cache's key, the hand-off's dedupe key and a part of its proof.

``hash(block i) = blake2b-128(hash(block i-1) ‖ token ids of block i)``; the chain starts at the fingerprint of the model and the
request's cache salt, so equal hashes mean equal model, equal salt, equal tokens and equal position. blake2b keeps the chain
collision resistant: a prompt that was built to collide with another user's must not read that user's KV.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence

HASH_NBYTES = 16
MAX_CACHE_SALT = 256  # characters


def root_hash(fingerprint: bytes) -> bytes:
    """The parent of every first block, from the model's fingerprint (see :mod:`kvrelay.common.model_card`)."""
    return hashlib.blake2b(fingerprint, digest_size=HASH_NBYTES, person=b"kvrelay-root").digest()


def salted(root: bytes, cache_salt: str) -> bytes:
    """The root of chains that only requests with this salt share; ``root`` itself without one."""
    if not cache_salt:
        return root
    return hashlib.blake2b(root + cache_salt.encode(), digest_size=HASH_NBYTES, person=b"kvrelay-salt").digest()


def chain_hashes(root: bytes, token_ids: Sequence[int], block_size: int, *, known: Sequence[bytes] = ()) -> list[bytes]:
    """Hashes of all blocks of ``token_ids``, the last one partial if the length is no multiple of ``block_size``.

    ``known`` are the hashes of the leading full blocks if the caller has them already; they are kept as they are
    and the chain goes on behind them.
    """
    return [*known, *hashes_behind(known[-1] if known else root, token_ids[len(known) * block_size :], block_size)]


def hashes_behind(parent: bytes, token_ids: Sequence[int], block_size: int) -> Iterator[bytes]:
    """Hashes of all blocks of ``token_ids`` behind the block, or the root, with hash ``parent``; each when it is asked for."""
    # One array in all: half the time of a block at a time.
    tokens = array("I", token_ids)
    data, block_nbytes = tokens.tobytes(), block_size * tokens.itemsize
    for start in range(0, len(data), block_nbytes):
        block = parent + data[start : start + block_nbytes]
        parent = hashlib.blake2b(block, digest_size=HASH_NBYTES, person=b"kvrelay-block").digest()
        yield parent
