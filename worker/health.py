"""Whether a worker is well: what readiness and liveness watch, the same for both kinds of worker."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from kvrelay.engine.kv.block_manager import BlockManager

_READY_TICK_S = 30.0  # a chunk on a slow CPU takes seconds; half a minute without a step is not normal
_LIVE_TICK_S = 300.0


class Ticking(Protocol):
    """A loop on a thread of its own (kvrelay.worker.loop.ModelLoop)."""

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""

    @property
    def silent_s(self) -> float:
        """How long ago it last came round."""


def loop_reasons(loop: Ticking, bound_s: float) -> list[str]:
    """Reasons against a model loop that died, or has not come round for ``bound_s``."""
    if not loop.is_alive:
        return ["the model loop is dead"]
    return [f"the model loop has not ticked for {loop.silent_s:.0f} s"] if loop.silent_s > bound_s else []


def not_live(loop: Ticking) -> list[str]:
    """Reasons to restart the process."""
    return loop_reasons(loop, _LIVE_TICK_S)


def not_ready(loop: Ticking, blocks: BlockManager) -> list[str]:
    """Reasons to send no traffic."""
    ledgers = [blocks.ledger(group) for group in range(blocks.num_groups)]
    unbalanced = [f"the ledger does not balance: {ledger}" for ledger in ledgers if not ledger.balances]
    return loop_reasons(loop, _READY_TICK_S) + unbalanced


def ledger_json(blocks: BlockManager) -> dict[str, object]:
    """The ledger for /debug/kv."""
    retained = blocks.retained()
    return {
        "groups": [_group_json(blocks, group) for group in range(blocks.num_groups)],
        "retained": {  # some of the cached ones
            "blocks": len(retained),
            "at_most": blocks.max_retained,
            "by_priority": {
                str(priority): ranges(block_id for block_id, its in retained.items() if its == priority)
                for priority in sorted(set(retained.values()), reverse=True)
            },
        },
        "owners": {f"{owner.kind.value} {owner.key}": count for owner, count in blocks.owners().items()},
    }


def _group_json(blocks: BlockManager, group: int) -> dict[str, object]:
    """One group of layers: how many of its blocks are where, and which."""
    ledger = blocks.ledger(group)
    return {
        "num_blocks": ledger.num_blocks,
        "free": ledger.num_free,
        "cached": ledger.num_cached,
        "leased": ledger.num_leased,
        "running": ledger.num_running,
        "balances": ledger.balances,
        "blocks": {place: ranges(block_ids) for place, block_ids in blocks.places(group).items()},
    }


def ranges(block_ids: Iterable[int]) -> str:
    """``3, 0, 1, 2, 7`` as ``0-3,7``: a pool may have a hundred thousand blocks."""
    pieces: list[list[int]] = []
    for block_id in sorted(block_ids):
        if pieces and block_id == pieces[-1][1] + 1:
            pieces[-1][1] = block_id
        else:
            pieces.append([block_id, block_id])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in pieces)
