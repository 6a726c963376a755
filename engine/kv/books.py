"""The block manager's books as people read them: /debug/kv, and reasons against a pool that has lost a block."""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay.engine.kv.block_manager import BlockManager


def unbalanced(blocks: BlockManager) -> list[str]:
    """Reasons to send no traffic: a group whose ledger does not balance."""
    ledgers = [blocks.ledger(group) for group in range(blocks.num_groups)]
    return [f"the ledger does not balance: {ledger}" for ledger in ledgers if not ledger.balances]


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
