"""Chained block hashes: the prefix cache's key, the hand-off's dedupe key and a part of its proof.

``hash(block i) = blake2b-128(hash(block i-1) ‖ extra keys ‖ token ids of block i)``; the chain starts at the
fingerprint of the model, so equal hashes mean equal model, equal tokens and equal position. blake2b keeps the
chain collision resistant: a prompt that was built to collide with another user's must not read that user's KV.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

HASH_NBYTES = 16


def root_hash(fingerprint: bytes) -> bytes:
    """The parent of every first block, from the model's fingerprint (see :mod:`kvrelay.common.model_card`)."""
    return hashlib.blake2b(fingerprint, digest_size=HASH_NBYTES, person=b"kvrelay-root").digest()


def block_hash(parent: bytes, token_ids: Sequence[int], extra: bytes = b"") -> bytes:
    """Hash of one block, full or partial.

    ``extra`` carries whatever else the KV depends on, such as an adapter's id. Its length is hashed before it, so
    no two different pairs of extra keys and tokens share an input.
    """
    hasher = hashlib.blake2b(parent, digest_size=HASH_NBYTES, person=b"kvrelay-block")
    hasher.update(len(extra).to_bytes(4, "little"))
    hasher.update(extra)
    hasher.update(array("I", token_ids).tobytes())
    return hasher.digest()


def chain_hashes(
    root: bytes, token_ids: Sequence[int], block_size: int, extra: bytes = b"", *, known: Sequence[bytes] = ()
) -> list[bytes]:
    """Hashes of all blocks of ``token_ids``, the last one partial if the length is no multiple of ``block_size``.

    ``known`` are the hashes of the leading full blocks if the caller has them already; they are kept as they are
    and the chain goes on behind them.
    """
    hashes = list(known)
    parent = hashes[-1] if hashes else root
    for start in range(len(hashes) * block_size, len(token_ids), block_size):
        parent = block_hash(parent, token_ids[start : start + block_size], extra)
        hashes.append(parent)
    return hashes
