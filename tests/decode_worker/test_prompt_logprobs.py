"""Prompt log probabilities on a decode worker: only of prompts that it computes, and only once, even after a preemption."""

from __future__ import annotations

import msgspec

from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.engine.fake.language import token_digests, with_logprobs
from kvrelay.wire.messages import Offer, Submit
from tests.decode_worker.rig import Rig as ModelRig
from tests.decode_worker.rig import greedy
from tests.decode_worker.service_rig import CARD, Rig, offer, submit

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
    made = asking(offer("a", list(range(5))))
    assert isinstance(made, Offer)
    rig.verify(rig.grant(made), made, 7)
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
