"""The drafter of guided output: text that a guide forces, such as names and punctuation of a JSON schema.

It needs no model and no table. It splits the text with the tokenizer, and is wrong only if the model splits it differently.
"""

from __future__ import annotations

from kvrelay.decode_worker.drafter import LookUp
from kvrelay.engine.step.sequence import Sequence


class GuideDrafter(LookUp):
    """Implements :class:`kvrelay.decode_worker.drafter.Drafter`."""

    name = "guide"
    num_trusted = 8

    def foresee(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        """See Drafter."""
        return () if sequence.guide is None else sequence.guide.forced(max_tokens)

    def forget(self, sequence: Sequence) -> None:
        """See Drafter. There is no state."""
