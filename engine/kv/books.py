"""The block manager's records for people: /debug/kv, and reasons not to be live if a block is lost."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.ledger import Ledger


def unbalanced(blocks: BlockManager) -> list[str]:
    """Reasons to send no traffic: the ledger does not balance."""
    ledger = blocks.ledger()
    return [] if ledger.balances else [f"the ledger does not balance: {ledger}"]


def ledger_json(blocks: BlockManager) -> dict[str, object]:
    """The ledger for /debug/kv: of the pool, and the blocks of each layer group."""
    retained = blocks.retained()
    return {
        **_counts(blocks.ledger()),
        "balances": blocks.ledger().balances,
        "free_blocks": ranges(blocks.free_blocks()),
        "groups": [
            {
                "window": msgspec.to_builtins(window),
                **_counts(blocks.ledger(group)),
                "blocks": {place: ranges(block_ids) for place, block_ids in blocks.places(group).items()},
            }
            for group, window in enumerate(blocks.windows)
        ],
        "retained": {  # a part of the cached ones
            "blocks": len(retained),
            "at_most": blocks.max_retained,
            "by_priority": {
                str(priority): ranges(block_id for block_id, its in retained.items() if its == priority)
                for priority in sorted(set(retained.values()), reverse=True)
            },
        },
        "owners": {f"{owner.kind.value} {owner.key}": count for owner, count in blocks.owners().items()},
    }


def _counts(ledger: Ledger) -> dict[str, int]:
    return {
        "num_blocks": ledger.num_blocks,
        "free": ledger.num_free,
        "cached": ledger.num_cached,
        "leased": ledger.num_leased,
        "running": ledger.num_running,
    }


def ranges(block_ids: Iterable[int]) -> str:
    """``3, 0, 1, 2, 7`` as ``0-3,7``, because a pool may have a hundred thousand blocks."""
    pieces: list[list[int]] = []
    for block_id in sorted(block_ids):
        if pieces and block_id == pieces[-1][1] + 1:
            pieces[-1][1] = block_id
        else:
            pieces.append([block_id, block_id])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in pieces)
