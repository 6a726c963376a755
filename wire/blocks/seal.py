"""Sealed KV blocks: AES-256-GCM, one key per lease, straight from pool memory and into pool memory.

A sealed payload is the ciphertext and behind it the tag, ``TAG_NBYTES`` more than the block. The header is the associated data, so
a block under another header, of another lease or with one bit changed does not open; a checksum beside it would add nothing.
The nonce names piece and block: a key is made for one lease, and its sender seals each piece once (``claim`` refuses the second
time). So no pair of key and nonce is used twice.

The key travels on the control channel. Whoever can read that channel can open and forge every block.
"""

from __future__ import annotations

import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvrelay.wire.blocks.frames import BlockHeader

KEY_NBYTES = 32
TAG_NBYTES = 16
_NONCE = struct.Struct("<IQ")  # piece, block


def new_key() -> bytes:
    """A key for one lease, ``KEY_NBYTES`` from the system's random source."""
    return AESGCM.generate_key(KEY_NBYTES * 8)


def seal_mismatch(*, decode_seals: bool, prefill_seals: bool) -> str:
    """The message for a worker whose ``--seal-kv`` differs from ours."""
    return (
        f"--seal-kv differs (decode / prefill): {str(decode_seals).lower()} / {str(prefill_seals).lower()}; "
        "start both workers with the same"
    )


class BlockSealer:
    """The sending side of one lease. ``claim`` on one thread, ``seal`` on any, also on several at a time."""

    def __init__(self, key: bytes) -> None:
        """Raises ValueError if ``key`` does not have ``KEY_NBYTES``."""
        self._cipher = _cipher(key)
        self._claimed: set[bytes] = set()

    def claim(self, header: BlockHeader) -> None:
        """Take the nonce of a piece. Raises ValueError if it was taken before: using a nonce twice reveals the key."""
        nonce = _nonce(header)
        if nonce in self._claimed:
            raise ValueError(
                f"piece {header.piece_index} of block {header.block_index} was sealed under this key already; a block that changed "
                "needs a new lease"
            )
        self._claimed.add(nonce)

    def seal(self, header: BlockHeader, payload: memoryview, target: memoryview) -> bytes:
        """Write the sealed payload into ``target`` (``TAG_NBYTES`` more than ``payload``); returns the header's frame."""
        frame = header.pack_sealed()
        self._cipher.encrypt_into(_nonce(header), payload, frame, target)
        return frame


class BlockOpener:
    """The receiving side of one lease. On any thread, also on several at a time."""

    def __init__(self, key: bytes) -> None:
        """Raises ValueError if ``key`` does not have ``KEY_NBYTES``."""
        self._cipher = _cipher(key)

    def open(self, header: BlockHeader, sealed: memoryview, target: memoryview) -> bool:
        """Decrypt into ``target`` (``TAG_NBYTES`` less than ``sealed``) and say whether header and payload are the sealer's.

        If not, ``target`` holds bytes that somebody else may have chosen: nothing may be read before a block opens into it.
        """
        try:
            self._cipher.decrypt_into(_nonce(header), sealed, header.pack_sealed(), target)
        except InvalidTag:
            return False
        return True


def _cipher(key: bytes) -> AESGCM:
    if len(key) != KEY_NBYTES:
        raise ValueError(f"a key of {len(key)} bytes; it must have {KEY_NBYTES}")
    return AESGCM(key)


def _nonce(header: BlockHeader) -> bytes:
    return _NONCE.pack(header.piece_index, header.block_index)
