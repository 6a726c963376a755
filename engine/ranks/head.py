"""The layer of a checkpoint that drafts, on several ranks: all guess together, as they compute steps together.

Every rank hears each step's hidden states, which are equal behind a layer's sums, and keeps the K/V of the layer for its part. To
guess, the leader tells the texts' newest tokens. Each rank then samples the same tokens by itself, as in a step.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from kvrelay.engine.models.draft_head import HeadBesideModel
from kvrelay.engine.ranks.messages import Draft, GiveUpDrafts
from kvrelay.engine.step.interface import HeadAsk

Together = Callable[[Draft, Callable[[], list[tuple[int, ...]]]], list[tuple[int, ...]]]
"""All ranks do what the message says, and this process calls the function; or none does. See RankedEngine."""


class RankedHead:
    """Implements :class:`kvrelay.engine.step.interface.DraftHead` on the leader."""

    def __init__(self, own: HeadBesideModel, together: Together, tell: Callable[[Any], None]) -> None:
        """``own``: the leader's part. ``tell``: sends a message to the other ranks, in the order of steps."""
        self._own = own
        self._together = together
        self._tell = tell

    def can_draft(self, slot: int, num_tokens: int) -> bool:
        """See DraftHead. Equal on all ranks."""
        return self._own.can_draft(slot, num_tokens)

    def draft(self, asks: Seq[HeadAsk]) -> list[tuple[int, ...]]:
        """See DraftHead. Raises DeviceFailedError if a rank is lost, or fails alone."""
        return self._together(Draft(self._own.told(asks)), lambda: self._own.draft(asks))

    def give_up(self) -> None:
        """See DraftHead."""
        self._tell(GiveUpDrafts())
        self._own.give_up()
