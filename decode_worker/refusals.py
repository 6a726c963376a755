"""What a decode worker refuses: misfit prefill workers, impossible commits, too large images, and prompts of which too little is
cached.

Local prefill slows running sequences. A gateway's map of cached prefixes may be outdated. So a gateway that sends a prompt for its
cached prefix says how much may be missing. If more is missing, the worker refuses, and the gateway decides again.
"""

from __future__ import annotations

from kvrelay.common.block_hash import HashChain
from kvrelay.common.model_card import KvLayout
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.step.sequence import Sequence
from kvrelay.wire.blocks.seal import seal_mismatch
from kvrelay.wire.messages import FailureCode, Hello, HelloRefused, Submit
from kvrelay.worker.scheduling.whole_images import longest_chunk
from kvrelay.worker.submit import Refusal, WorkerIdentity, spans_of


def misfit(hello: Hello, mine: KvLayout, *, seals_kv: bool) -> HelloRefused | None:
    """Why this worker cannot read the KV blocks of the prefill worker that sent ``hello``; None if it can."""
    if hello.layout is None or hello.layout.fingerprint() != mine.fingerprint():
        differences = ["no layout given"] if hello.layout is None else mine.differences(hello.layout)
        detail = f"KV layouts differ (decode / prefill): {'; '.join(differences)}"
    elif hello.seals_kv is not seals_kv:
        detail = seal_mismatch(decode_seals=seals_kv, prefill_seals=hello.seals_kv)
    else:
        return None
    return HelloRefused(code=FailureCode.LAYOUT_MISMATCH, detail=detail)


def unlikely_offset(position_offset: int, sequence: Sequence, max_model_len: int) -> str | None:
    """Why no prompt's positions can be off by so much after it; None if they can. Those of text are not."""
    least, most = (-sequence.num_prompt_tokens, max_model_len) if sequence.spans else (0, 0)
    if least <= position_offset <= most:
        return None
    return f"the commit's position_offset is {position_offset}; it must be {least} to {most}"


def images_too_large(submit: Submit, identity: WorkerIdentity) -> Refusal | None:
    """Why no step has room for an image that it must compute whole, beside all sequences that may generate; None if one has."""
    if identity.max_step_tokens is None:
        return None
    most = identity.max_step_tokens - identity.max_running
    longest = longest_chunk(spans_of(submit), len(submit.token_ids))
    if longest <= most:
        return None
    detail = (
        f"{longest} tokens of the prompt's images must be computed together; the limit is {most}, --max-batched-tokens without "
        "--max-num-seqs"
    )
    return Refusal(FailureCode.INVALID, detail)


def cache_miss(submit: Submit, blocks: BlockManager, chain: HashChain) -> Refusal | None:
    """Why the request should not be computed here; None if it may be. ``chain``: hashes its blocks.

    None is no promise: blocks that are cached now may be evicted while the request waits.
    """
    num_tokens, most = len(submit.token_ids), submit.max_uncached_tokens
    if most is None or num_tokens <= most:
        return None
    # The last token is always computed.
    hashes = chain.hashes(submit.token_ids, (num_tokens - 1) // blocks.block_size)
    num_uncached = num_tokens - blocks.num_cached_prefix(hashes) * blocks.block_size
    if num_uncached <= most:
        return None
    return Refusal(
        FailureCode.NOT_CACHED, f"{num_uncached} of {num_tokens} tokens are not cached here; the limit is {most}"
    )
