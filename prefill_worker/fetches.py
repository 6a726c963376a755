"""Prompts whose blocks come back from the tier below the pool before they begin (:mod:`kvrelay.engine.kv.lower_tier`).

A prompt is looked up when it could begin, or is among the next in line. While its blocks are copied, other prompts take its turn.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kvrelay.engine.kv.lower_tier import Fetch, LowerTier
from kvrelay.engine.step.sequence import Sequence, SequenceStatus
from kvrelay.worker.scheduling.sequence_blocks import SequenceBlocks
from kvrelay.worker.scheduling.suspects import Key

# Of one prompt: its first fetch may be another prompt's with a shorter prefix in common. More, and two prompts could take each
# other's blocks for ever.
_MAX_FETCHES = 2
_NUM_NEXT = 2  # waiting prompts whose blocks are brought back while those before them are computed


@dataclass(slots=True)
class _Asked:
    """What a prompt has asked for so far."""

    num_fetches: int = 0
    fetch: Fetch | None = None  # None: nothing is under way


class Fetches:
    """The fetches of waiting prompts. Model thread only."""

    def __init__(self, tier: LowerTier | None, held: SequenceBlocks, on_come: Callable[[Sequence], None]) -> None:
        """``tier``: None: there are no fetches. ``on_come``: called with each prompt whose blocks have come."""
        self._tier = tier
        self._held = held
        self._on_come = on_come
        self._asked: dict[Key, _Asked] = {}

    def is_under_way(self, sequence: Sequence) -> bool:
        """Whether the prompt's blocks are being copied."""
        asked = self._asked.get(sequence.key)
        if asked is None or asked.fetch is None:
            return False
        if not asked.fetch.is_done:
            return True
        asked.fetch = None
        self._on_come(sequence)
        return False

    def begin(self, sequence: Sequence) -> bool:
        """Begin to copy the prompt's blocks, if the tier has more of it than the pool. Whether the prompt must now wait."""
        if self._tier is None:
            return False
        asked = self._asked.setdefault(sequence.key, _Asked())
        if asked.fetch is not None or asked.num_fetches == _MAX_FETCHES:
            return asked.fetch is not None
        fetch = self._tier.fetch(self._held.reusable_hashes(sequence))
        if fetch is None:
            return False  # the prompt, which needs as much, has no room either
        asked.num_fetches = _MAX_FETCHES if fetch.is_done else asked.num_fetches + 1
        asked.fetch = None if fetch.is_done else fetch
        return asked.fetch is not None

    def begin_next(self, line: Seq[Sequence]) -> None:
        """Begin for the next waiting prompts of the line, before it is their turn."""
        if self._tier is not None:
            for sequence in [one for one in line if one.status is SequenceStatus.WAITING][:_NUM_NEXT]:
                self.begin(sequence)

    def forget(self, key: Key) -> None:
        """The prompt begins, or is gone. Copies under way go on."""
        self._asked.pop(key, None)
