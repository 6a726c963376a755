"""How many physical blocks of a pool are free, cached, leased and running: their sum must be the pool."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where all physical blocks are, or those of one group. A block that sequences share counts once, as running."""

    num_blocks: int
    num_free: int
    num_cached: int
    num_leased: int
    num_running: int

    @property
    def balances(self) -> bool:
        """free + cached + leased + running == all blocks."""
        return self.num_free + self.num_cached + self.num_leased + self.num_running == self.num_blocks
