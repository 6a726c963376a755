"""An engine without a model: real blocks, real bytes, made-up tokens. For tests, and for load without weights or torch.

The K/V of a token is a digest of all tokens up to it, written into the pool like real K/V. Before a token is sampled the
engine reads back *every* position's bytes and compares them with what they must be, so a block that was swapped,
stale or never written is found exactly where a real model would silently compute nonsense.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from collections.abc import Sequence as Seq

from kvrelay.common.model_card import KvLayout, ModelCard
from kvrelay.common.sampling import SampledToken
from kvrelay.engine.interface import StepRow
from kvrelay.engine.sequence import Sequence

_DIGEST_NBYTES = 8


class MemoryStore:
    """A pool in plain memory. Implements :class:`kvrelay.engine.interface.BlockStore`."""

    def __init__(self, num_blocks: int, block_nbytes: int) -> None:
        self.num_blocks = num_blocks
        self.block_nbytes = block_nbytes
        self._memory = memoryview(bytearray(num_blocks * block_nbytes))

    def block(self, block_id: int) -> memoryview:
        """The block's memory."""
        return self._memory[block_id * self.block_nbytes : (block_id + 1) * self.block_nbytes]

    def open_read(self, block_id: int) -> memoryview:
        """See BlockStore."""
        return self.block(block_id).toreadonly()

    def close_read(self, block_id: int) -> None:
        """See BlockStore."""

    def open_write(self, block_id: int) -> memoryview:
        """See BlockStore."""
        return self.block(block_id)

    def close_write(self, block_id: int) -> None:
        """See BlockStore."""


def fake_card(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    token_nbytes: int = 32,
    max_model_len: int = 4096,
    model_id: str = "fake",
    vocab_size: int = 1000,
) -> ModelCard:
    """A card for a fake engine; equal ``model_id``, ``block_size`` and ``token_nbytes`` give equal fingerprints."""
    layout = KvLayout(
        model_id=model_id,
        weights_digest="fake",
        kv_dtype="bytes",
        num_layers=1,
        num_kv_heads=1,
        head_dim=token_nbytes,
        block_size=block_size,
        rope="{}",
    )
    return ModelCard(
        layout=layout,
        vocab_size=vocab_size,
        max_model_len=min(max_model_len, num_blocks * block_size),
        num_blocks=num_blocks,
        block_nbytes=block_size * token_nbytes,
    )


class KvMismatchError(AssertionError):
    """The pool does not hold the K/V that the sequence's tokens must have: some hand-off or allocation lied."""


class FakeEngine:
    """Implements :class:`kvrelay.engine.interface.Engine`; ``on_step`` is called at the start of every step."""

    def __init__(self, card: ModelCard, on_step: Callable[[Seq[StepRow]], None] = lambda rows: None) -> None:
        if card.layout.head_dim < _DIGEST_NBYTES:
            raise ValueError(f"{card.layout.head_dim} bytes per token; a fake engine needs at least {_DIGEST_NBYTES}")
        self.card = card
        self.store = MemoryStore(card.num_blocks, card.block_nbytes)
        self._on_step = on_step

    def step(self, rows: Seq[StepRow]) -> list[SampledToken | None]:
        """See Engine. Raises KvMismatchError if a sampling row's K/V in the pool is not its tokens' K/V."""
        self._on_step(rows)
        return [self._run(row) for row in rows]

    def _run(self, row: StepRow) -> SampledToken | None:
        sequence = row.sequence
        digests = token_digests(sequence.token_ids)
        end = sequence.num_computed_tokens + row.num_tokens
        if row.num_tokens < 1 or end > sequence.num_tokens:
            raise ValueError(f"{sequence.key}: no {row.num_tokens} tokens behind {sequence.num_computed_tokens}")
        if len(sequence.block_table) * self.card.layout.block_size < end:
            raise ValueError(f"{sequence.key}: {len(sequence.block_table)} blocks do not hold {end} tokens")
        for position in range(sequence.num_computed_tokens, end):
            self._slot(sequence, position)[:] = _spread(digests[position], self.card.layout.head_dim)
        if not row.samples:
            return None
        for position in range(end):
            if bytes(self._slot(sequence, position)) != _spread(digests[position], self.card.layout.head_dim):
                raise KvMismatchError(f"{sequence.key}: K/V of position {position} is not that of its tokens")
        return SampledToken(next_token(sequence, digests[-1], self.card.vocab_size))

    def _slot(self, sequence: Sequence, position: int) -> memoryview:
        block_size, token_nbytes = self.card.layout.block_size, self.card.layout.head_dim
        block = self.store.block(sequence.block_table[position // block_size])
        start = (position % block_size) * token_nbytes
        return block[start : start + token_nbytes]


def token_digests(token_ids: Seq[int]) -> list[bytes]:
    """One digest per token, over that token and all before it."""
    digests: list[bytes] = []
    parent = b""
    for token_id in token_ids:
        parent = hashlib.blake2b(parent + token_id.to_bytes(4, "little"), digest_size=_DIGEST_NBYTES).digest()
        digests.append(parent)
    return digests


def next_token(sequence: Sequence, digest: bytes, vocab_size: int) -> int:
    """The token behind ``digest``: the same on every worker; depends on the seed unless the sampling is greedy."""
    salt = b"" if sequence.sampling.temperature == 0 else sequence.sampling.seed.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(digest + salt, digest_size=4).digest(), "little") % vocab_size


def expected_output(token_ids: Seq[int], num_tokens: int, vocab_size: int) -> list[int]:
    """What a greedy fake engine generates after ``token_ids``."""
    tokens = list(token_ids)
    for _ in range(num_tokens):
        digest = token_digests(tokens)[-1]
        tokens.append(int.from_bytes(hashlib.blake2b(digest, digest_size=4).digest(), "little") % vocab_size)
    return tokens[len(token_ids) :]


def _spread(digest: bytes, nbytes: int) -> bytes:
    return (digest * (nbytes // len(digest) + 1))[:nbytes]
