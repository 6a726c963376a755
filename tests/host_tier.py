"""Whether a tier of KV in the host's memory has all that its pool has published."""

from __future__ import annotations

from kvrelay.engine.kv.host.tier import HostTier


def has_copied_out(tier: HostTier) -> bool:
    """Whether its thread has copied every published block. Under its lock: a block that it takes off the queue is, for a moment,
    neither queued nor under way.
    """
    with tier._changed:
        return not (tier.num_queued or tier._out._under_way)
