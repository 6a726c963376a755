"""Prompt log probabilities on a prefill worker: the prompt is computed without the cache, and all come with the first token."""

from __future__ import annotations

import msgspec

from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.engine.fake.language import token_digests, with_logprobs
from kvrelay.wire.messages import Submit, TokenDelta, Tokens
from tests.prefill_worker.service_rig import CARD, PROMPT, Rig, submit
from tests.prefill_worker.test_scheduler import Rig as SchedulerRig
from tests.prefill_worker.test_scheduler import sequence


def asking(name: str, num_top: int | None) -> Submit:
    plain = submit(name)
    return msgspec.structs.replace(plain, sampling=msgspec.structs.replace(plain.sampling, num_prompt_logprobs=num_top))


def expected(num_top: int) -> list[SampledToken]:
    digests = token_digests(PROMPT)
    return [
        with_logprobs(PROMPT[position], digests[position - 1], num_top, CARD.vocab_size)
        for position in range(1, len(PROMPT))
    ]


def first_delta(rig: Rig, name: str) -> TokenDelta:
    [delta] = [
        item
        for message in rig.told(Tokens)
        if isinstance(message, Tokens)
        for item in message.items
        if item.request_id == name
    ]
    return delta


def test_they_come_with_the_first_token_and_only_if_asked_for() -> None:
    rig = Rig()
    for name, num_top in (("a", None), ("b", 0), ("c", 2)):
        rig.ask(asking(name, num_top))
    rig.finish()
    assert first_delta(rig, "a").prompt_logprobs is None
    assert first_delta(rig, "b").prompt_logprobs == expected(0)
    assert first_delta(rig, "c").prompt_logprobs == expected(2)


def test_a_cached_prefix_is_computed_anew_for_them() -> None:
    rig = SchedulerRig()
    tokens = list(range(20))
    rig.scheduler.add(sequence("a", tokens))
    assert rig.step()[0] == [("a", 20)]
    asks = sequence("b", tokens)
    asks.sampling = SamplingParams(max_tokens=8, temperature=0.0, num_prompt_logprobs=0)
    rig.scheduler.add(asks)
    rig.scheduler.add(sequence("c", tokens))
    assert rig.step()[0] == [("b", 20), ("c", 4)]
    assert asks.num_cached_tokens == 0
