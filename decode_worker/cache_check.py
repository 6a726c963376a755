"""Whether a request that came for what is cached here finds it: the gateway's map of prefixes is of the past.

Local prefill computes beside running sequences. A gateway that sends a prompt here for its cached prefix says how much may be
missing; if more is, the request is refused before it computes anything, and the gateway decides anew.
"""

from __future__ import annotations

from kvrelay.common.block_hash import HashChain
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.wire.messages import FailureCode, Submit
from kvrelay.worker.submit import Refusal


def cache_miss(submit: Submit, blocks: BlockManager, chain: HashChain) -> Refusal | None:
    """Why the request should not be computed here; None if it may be. ``chain``: of its blocks.

    A yes is no promise: what is cached now may be evicted while the request waits for its place.
    """
    num_tokens, most = len(submit.token_ids), submit.max_uncached_tokens
    if most is None or num_tokens <= most:
        return None
    # The last token is always computed anew.
    hashes = chain.hashes(submit.token_ids, (num_tokens - 1) // blocks.block_size)
    num_uncached = num_tokens - blocks.num_cached_prefix(hashes) * blocks.block_size
    if num_uncached <= most:
        return None
    return Refusal(
        FailureCode.NOT_CACHED, f"{num_uncached} of {num_tokens} tokens are not cached here; the limit is {most}"
    )
