"""Chained block hashes: the prefix cache's key, the hand-off's dedupe key and a part of its proof. Nobody else hashes blocks.

``hash(block i) = blake2b-128(hash(block i-1) ‖ token ids of block i)``. If images begin in a block, their digests are hashed
between the two. The chain starts at the fingerprint of the model and the
request's extra keys, so equal hashes mean equal model, equal keys, equal tokens and equal position. blake2b keeps the chain
collision resistant: a prompt that was built to collide with another user's must not read that user's KV.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from kvrelay.common.adapter_files import AdapterRef
from kvrelay.common.images import ImageSpan

HASH_NBYTES = 16
MAX_CACHE_SALT = 256  # characters

_BLOCKS_AT_ONCE = 32  # become bytes together, which halves the time; each is hashed when it is asked for


class HashChain:
    """The hashes of one sequence's blocks, each made once, when somebody asks for it first.

    Whoever asks gives the sequence's tokens; of these only more may come behind. Not thread-safe, and one iteration at a time.
    """

    __slots__ = ("_block_size", "_digests", "_known", "_root")

    def __init__(
        self,
        fingerprint: bytes,
        block_size: int,
        *,
        cache_salt: str = "",
        adapter: AdapterRef | None = None,
        images: Iterable[ImageSpan] = (),
    ) -> None:
        """``fingerprint``: of the model (see :mod:`kvrelay.common.model_card`). ``block_size``: tokens per block.

        The others are extra keys: only requests with the same ones share blocks. One with its default changes no hash.
        Of an adapter its content counts, and not its name. ``images``: of the sequence, in order.
        """
        extra_keys = {"cache_salt": cache_salt} if cache_salt else {}
        if adapter is not None:
            extra_keys["adapter"] = adapter.digest
        start = msgspec.msgpack.encode((fingerprint, extra_keys))
        self._root = hashlib.blake2b(start, digest_size=HASH_NBYTES, person=b"kvrelay-root").digest()
        self._block_size = block_size
        self._known: list[bytes] = []  # of the leading full blocks
        self._digests: dict[int, list[bytes]] = {}  # of the images that begin in a block, by the block's place
        for image in images:
            self._digests.setdefault(image.start // block_size, []).append(image.digest)

    @property
    def known(self) -> Sequence[bytes]:
        """The hashes that somebody has asked for, from the first full block on."""
        return self._known

    def copy(self) -> HashChain:
        """A chain of its own for a sequence that begins with the same tokens."""
        chain = HashChain.__new__(HashChain)
        chain._root, chain._block_size, chain._known = self._root, self._block_size, self._known.copy()
        chain._digests = self._digests
        return chain

    def iterate(self, token_ids: Sequence[int], num_blocks: int) -> Iterator[bytes]:
        """Hashes of the leading ``num_blocks`` blocks, which ``token_ids`` must fill; each is made when it is taken.

        Raises OverflowError on a token id that is not in 0 to 2**32 - 1.
        """
        yield from self._known[:num_blocks]
        for first in range(len(self._known), num_blocks, _BLOCKS_AT_ONCE):
            after = min(first + _BLOCKS_AT_ONCE, num_blocks)
            for block_hash in self._behind(token_ids[first * self._block_size : after * self._block_size]):
                self._known.append(block_hash)
                yield block_hash

    def hashes(self, token_ids: Sequence[int], num_blocks: int) -> list[bytes]:
        """The same at once, as a list of the caller's."""
        num_known = len(self._known)
        if num_known < num_blocks:
            self._known += self._behind(token_ids[num_known * self._block_size : num_blocks * self._block_size])
        return self._known[:num_blocks]

    def hashes_of_all(self, token_ids: Sequence[int]) -> list[bytes]:
        """Hashes of all blocks of ``token_ids``, also of a last one that they do not fill. Raises as ``iterate``."""
        num_full = len(token_ids) // self._block_size
        full = self.hashes(token_ids, num_full)
        return [*full, *self._behind(token_ids[num_full * self._block_size :])]

    def _behind(self, token_ids: Sequence[int]) -> Iterator[bytes]:
        """Hashes of the blocks of ``token_ids``, the first behind what is known."""
        parent = self._known[-1] if self._known else self._root
        tokens = array("I", token_ids)
        data, block_nbytes = tokens.tobytes(), self._block_size * tokens.itemsize
        first = len(self._known)
        for place, start in enumerate(range(0, len(data), block_nbytes), first):
            block, person = data[start : start + block_nbytes], b"kvrelay-block"
            if self._digests and (digests := self._digests.get(place)) is not None:
                # The number keeps a digest from being read as tokens of a block that is not full.
                block, person = b"".join((len(digests).to_bytes(4), *digests, block)), b"kvrelay-images"
            parent = hashlib.blake2b(parent + block, digest_size=HASH_NBYTES, person=person).digest()
            yield parent
