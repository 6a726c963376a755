"""One attempt as the prefill worker's service sees it: what its hand-off needs to know."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.common.sampling import SampledToken
from kvrelay.wire.messages import Submit, Timings
from kvrelay.worker.entries import Entry


@dataclass(slots=True, eq=False, kw_only=True)
class PrefillEntry(Entry):
    """One attempt on a prefill worker."""

    submit: Submit
    block_hashes: list[bytes]  # of all blocks of the submitted tokens, the last one maybe partial
    decode_address: str  # of the worker that it is handed over to
    num_ready_blocks: int = 0
    commit: tuple[SampledToken, Timings] | None = None  # computed, for a link that is not up yet

    @property
    def num_earlier_tokens(self) -> int:
        """Output of earlier attempts; the sequence may have a token more, which the model thread appends."""
        return len(self.submit.token_ids) - self.submit.num_prompt_tokens

    def is_stuck(self, now_s: float, timeout_s: float) -> bool:
        """Whether its outcome was decided longer than ``timeout_s`` ago, and sends still hold its blocks."""
        return self.hand_off_holds and self.closed_s is not None and now_s - self.closed_s > timeout_s
