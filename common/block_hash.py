"""Chained block hashes: the prefix cache's key, the hand-off's dedupe key and a part of its proof.

``hash(block i) = blake2b-128(hash(block i-1) ‖ extra keys ‖ token ids of block i)``; the chain starts at the
fingerprint of the model, so equal hashes mean equal model, equal tokens and equal position. blake2b keeps the
chain collision resistant: a prompt that was built to collide with another user's must not read that user's KV.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence

HASH_NBYTES = 16


def root_hash(fingerprint: bytes) -> bytes:
    """The parent of every first block, from the model's fingerprint (see :mod:`kvrelay.common.model_card`)."""
    return hashlib.blake2b(fingerprint, digest_size=HASH_NBYTES, person=b"kvrelay-root").digest()


def block_hash(parent: bytes, token_ids: Sequence[int], extra: bytes = b"") -> bytes:
    """Hash of one block, full or partial.

    ``extra`` carries whatever else the KV depends on, such as an adapter's id. Its length is hashed before it, so
    no two different pairs of extra keys and tokens share an input.
    """
    return _digest(parent + _extra_keys(extra) + array("I", token_ids).tobytes())


def chain_hashes(
    root: bytes, token_ids: Sequence[int], block_size: int, extra: bytes = b"", *, known: Sequence[bytes] = ()
) -> list[bytes]:
    """Hashes of all blocks of ``token_ids``, the last one partial if the length is no multiple of ``block_size``.

    ``known`` are the hashes of the leading full blocks if the caller has them already; they are kept as they are
    and the chain goes on behind them.
    """
    return [
        *known,
        *hashes_behind(known[-1] if known else root, token_ids[len(known) * block_size :], block_size, extra),
    ]


def hashes_behind(parent: bytes, token_ids: Sequence[int], block_size: int, extra: bytes = b"") -> Iterator[bytes]:
    """Hashes of all blocks of ``token_ids`` behind the block, or the root, with hash ``parent``; each when it is asked for."""
    # One call of the hash per block and one array in all: half the time of a block at a time.
    tokens, between = array("I", token_ids), _extra_keys(extra)
    data, block_nbytes = tokens.tobytes(), block_size * tokens.itemsize
    for start in range(0, len(data), block_nbytes):
        parent = _digest(parent + between + data[start : start + block_nbytes])
        yield parent


def _extra_keys(extra: bytes) -> bytes:
    return len(extra).to_bytes(4, "little") + extra


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=HASH_NBYTES, person=b"kvrelay-block").digest()
