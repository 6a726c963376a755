"""Counts of a pool's physical blocks: free, cached, leased and running. Their sum must be the pool's size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ledger:
    """The states of all physical blocks, or of one group's. A block that sequences share counts once, as running."""

    num_blocks: int
    num_free: int
    num_cached: int
    num_leased: int
    num_running: int

    @property
    def balances(self) -> bool:
        """free + cached + leased + running == all blocks."""
        return self.num_free + self.num_cached + self.num_leased + self.num_running == self.num_blocks
