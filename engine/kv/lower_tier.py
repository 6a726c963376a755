"""A second place for blocks, below the pool: what the block manager and schedulers know of it.

The pool's blocks are copied there while they are published, and come back when a prompt begins with them. A block's content is
fixed while it is published, so whoever copies it needs no hold on it, only to hear when that ends. So copies never take a block
from a sequence. :mod:`kvrelay.engine.kv.host.tier` is the only implementation: the host's memory below a GPU's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True, eq=False)
class Fetch:
    """Blocks that come back to the pool for a prompt. When it is done, those that came are in the pool's prefix cache."""

    is_done: bool = False  # set once, by any thread


class Watcher(Protocol):
    """Hears which blocks are published. Called under the block manager's lock: short, and without a call back to it."""

    def on_published(self, block_id: int, group: int, block_hash: bytes, sources: frozenset[str]) -> None:
        """The physical block's content does not change from now on. ``sources``: other workers whose work is in it."""

    def on_unpublished(self, block_id: int, group: int, block_hash: bytes) -> None:
        """The block may be written to as soon as this returns."""

    def on_distrusted(self, source: str) -> None:
        """What ``source`` has worked on must not be used any more."""


class LowerTier(Watcher, Protocol):
    """The place itself."""

    def fetch(self, hashes: Sequence[bytes]) -> Fetch | None:
        """Begin to bring back the blocks that a prompt with these leading ``hashes`` can go on behind. Never waits.

        The result is done at once if it would gain nothing, or little. None: the pool has no room for them now. Model thread only.
        """
