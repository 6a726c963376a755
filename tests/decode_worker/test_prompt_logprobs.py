"""Prompt log probabilities on a decode worker: only of prompts that it computes, and only once, even after a preemption."""

from __future__ import annotations

import msgspec

from kvrelay.common.block_hash import HashChain
from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.engine.fake.language import token_digests, with_logprobs
from kvrelay.wire.leases.lease import VerifiedLease
from kvrelay.wire.messages import Commit, Grant, Offer, Role, Submit
from tests.decode_worker.rig import Rig as ModelRig
from tests.decode_worker.rig import greedy
from tests.decode_worker.service_rig import BLOCK, CARD, EPOCH, FINGERPRINT, Rig, offer, submit

ASKS = SamplingParams(max_tokens=4, temperature=0.0, num_prompt_logprobs=1)


def asking(message: Submit | Offer) -> Submit | Offer:
    return msgspec.structs.replace(message, sampling=ASKS)


def expected(prompt: list[int]) -> list[SampledToken]:
    digests = token_digests(prompt)
    return [
        with_logprobs(prompt[position], digests[position - 1], 1, CARD.vocab_size) for position in range(1, len(prompt))
    ]


def test_they_come_with_the_first_token_of_local_prefill() -> None:
    rig = Rig()
    rig.ask(asking(submit("a", 9)))
    rig.ask(submit("b", 9))
    rig.finish()
    first, *others = rig.deltas("a")
    assert first.prompt_logprobs == expected(list(range(9)))
    assert len(others) == 3
    assert all(delta.prompt_logprobs is None for delta in others + rig.deltas("b"))
    rig.assert_nothing_left()


def test_a_prompt_that_was_handed_over_has_told_them() -> None:
    rig = Rig()
    tokens = list(range(5))
    rig.ask(asking(offer("a", tokens)), "prefill", Role.PREFILL)
    [grant] = [message for _, message in rig.sent if isinstance(message, Grant)]
    commit = Commit(
        lease_id=grant.lease_id,
        epoch=EPOCH,
        chain_hash=b"",
        first_token=SampledToken(7),
        num_cached_tokens=0,
    )
    made = asking(offer("a", tokens))
    assert isinstance(made, Offer)
    # No block is sent: the test looks only at the sequence that the verified lease becomes.
    lease_key, block_ids = next(
        (owner.key, rig.blocks.owned_blocks(owner)) for owner in rig.blocks.owners() if owner.kind == "lease"
    )
    chain = HashChain(FINGERPRINT, BLOCK)
    lease = VerifiedLease(grant.lease_id, lease_key, "prefill", made, chain, commit, [block_ids], 0.1)
    rig.service.on_lease_verified(lease)
    rig.handle()
    [taken] = rig.scheduler.waiting
    assert taken.sampling == msgspec.structs.replace(ASKS, num_prompt_logprobs=None)
    assert ASKS.after_prefill().after_prefill() == taken.sampling


def test_neither_the_cache_nor_a_preemption_leaves_one_out() -> None:
    rig, prompt = ModelRig(max_batched_tokens=16), list(range(40))
    rig.local("a", prompt, greedy(1))
    rig.run()
    rig.add("old", [1, 2, 3], greedy(40))
    rig.local("b", prompt, ASKS)
    assert rig.step() == [("old", 1), ("b", 15)]
    rig.scribble(rig.blocks.num_allocatable)
    while not rig.num_preemptions:
        rig.step()
    rig.let_go()
    rig.run()
    assert rig.prompt_logprobs == {"b": expected(prompt)}
