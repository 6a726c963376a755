"""A decode worker refuses a request if it has fewer of its tokens cached than the gateway expects."""

from __future__ import annotations

import pytest

from kvrelay.common.block_hash import HashChain
from kvrelay.common.sampling import SamplingParams
from kvrelay.decode_worker.refusals import cache_miss
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.owners import Owner, OwnerKind
from kvrelay.wire.messages import FailureCode, Submit


def chain() -> HashChain:
    return HashChain(b"model", 4)


def submit(num_tokens: int, most: int | None) -> Submit:
    return Submit(
        request_id="r",
        attempt=3,
        token_ids=list(range(num_tokens)),
        num_prompt_tokens=num_tokens,
        sampling=SamplingParams(max_tokens=4),
        max_uncached_tokens=most,
    )


@pytest.fixture
def blocks() -> BlockManager:
    """A pool with five cached blocks, of the prompt ``range(20)``."""
    manager, owner = BlockManager(16, 4, lambda: 0.0), Owner(OwnerKind.SEQUENCE, "a")
    manager.allocate(owner, 5)
    for index, block_hash in enumerate(chain().hashes(range(20), 5)):
        manager.publish(owner, index, block_hash)
    manager.release(owner)
    return manager


@pytest.mark.parametrize(("num_tokens", "most"), [(30, None), (30, 10), (21, 1), (20, 4), (3, 3), (1, 1)])
def test_what_is_allowed(blocks: BlockManager, num_tokens: int, most: int | None) -> None:
    assert cache_miss(submit(num_tokens, most), blocks, chain()) is None


@pytest.mark.parametrize(("num_tokens", "most", "num_uncached"), [(30, 9, 10), (20, 3, 4), (21, 0, 1)])
def test_what_is_refused(blocks: BlockManager, num_tokens: int, most: int, num_uncached: int) -> None:
    refusal = cache_miss(submit(num_tokens, most), blocks, chain())
    assert refusal is not None
    assert refusal.code is FailureCode.NOT_CACHED
    assert refusal.detail == f"{num_uncached} of {num_tokens} tokens are not cached here; the limit is {most}"
