"""The real engine with a step launched before the host knows the tokens of the step before: the same tokens as step by step."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrelay.common.sampling import SampledToken
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.sequence import Sequence, SequenceStatus
from kvrelay.engine.torch_engine import TorchEngine
from tests.engine.conftest import VOCAB, load, sequence
from tests.engine.led import lead, step, tokens_of
from tests.guides import ChainState

SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.7, "seed": 6, "top_k": 20, "num_logprobs": 3},
    {"temperature": 1.3, "seed": 7, "top_p": 0.8, "choice": 2},
    {"temperature": 0.0, "num_logprobs": 0, "logit_bias": ((3, 4.0),)},
    {"temperature": 0.0, "repetition_penalty": 1.3, "allowed_token_ids": (3, 50, 51, 198)},
    {
        "temperature": 1.2,
        "seed": 8,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.9,
        "logit_bias": ((9, 6.0), (8, 5.0)),
    },
    {
        "temperature": 0.0,
        "frequency_penalty": 0.4,
        "min_tokens": 12,
        "stop_token_ids": (3, 4, 5),
        "logit_bias": ((4, 9.0),),
    },
    {"temperature": 0.9, "seed": 9, "repetition_penalty": 0.8, "bad_words": ((7,), (8,)), "num_logprobs": 1},
)


def prompts(count: int) -> list[Sequence]:
    draws = random.Random(count)
    made = []
    for index in range(count):
        tokens = [draws.randrange(VOCAB) for _ in range(draws.randint(1, 40))]
        made.append(sequence(tokens, [5 * index + place for place in range(5)], **SAMPLING[index % len(SAMPLING)]))
    return made


def take(sequences: list[Sequence], counts: list[int], tokens: list[SampledToken | None]) -> list[SampledToken]:
    taken = []
    for one, count, token in zip(sequences, counts, tokens, strict=True):
        assert token is not None
        one.num_computed_tokens += count
        one.append(token, 10_000)
        taken.append(token)
    return taken


def begin(engine: TorchEngine, sequences: list[Sequence]) -> list[SampledToken]:
    counts = [one.num_uncomputed_tokens for one in sequences]
    rows = [StepRow(one, count) for one, count in zip(sequences, counts, strict=True)]
    return take(sequences, counts, step(engine, rows))


def test_a_row_ahead_of_no_step_is_refused(llama: tuple[Path, Any]) -> None:
    engine = load(llama[0], num_blocks=64, run_ahead="on")
    one, other = prompts(2)
    begin(engine, [one, other])
    with pytest.raises(ValueError, match="a row of 1 tokens, 1 ahead; only one token can follow"):
        lead(engine).launch([StepRow(one, 1, num_ahead=1)])
    launched = lead(engine).launch([StepRow(other, 1)])
    with pytest.raises(ValueError, match="only one token can follow"):
        lead(engine).launch([StepRow(one, 1, num_ahead=1)], behind=launched)
    launched.wait()


def test_a_deferred_step_samples_when_its_sequences_have_their_tokens(llama: tuple[Path, Any]) -> None:
    plain, ahead = load(llama[0], num_blocks=64), load(llama[0], num_blocks=64, run_ahead="on")
    expected_of, given_of = prompts(9), prompts(9)
    for one in (expected_of[3], given_of[3]):
        one.guide = ChainState(50)
    assert begin(plain, expected_of) == begin(ahead, given_of)
    expected = [take(expected_of, [1] * 9, step(plain, [StepRow(one, 1) for one in expected_of])) for _ in range(12)]
    given = []
    launched = lead(ahead).launch([StepRow(one, 1) for one in given_of])
    for _ in range(11):
        behind = lead(ahead).launch([StepRow(one, 1, num_ahead=1) for one in given_of], launched)
        assert behind.is_deferred
        with pytest.raises(AssertionError, match="not told to sample"):
            lead(ahead).launch([StepRow(one, 1, num_ahead=1) for one in given_of], behind)
        with pytest.raises(AssertionError, match="tokens, not"):
            behind.sample()
        given.append(take(given_of, [1] * 9, tokens_of(launched.wait())))
        behind.sample()
        launched = behind
    assert not launched.is_deferred
    given.append(take(given_of, [1] * 9, tokens_of(launched.wait())))
    assert given == expected


def test_a_step_that_was_not_told_to_sample_yields_nothing(llama: tuple[Path, Any]) -> None:
    engine = load(llama[0], num_blocks=64, run_ahead="on")
    (one,) = prompts(1)
    begin(engine, [one])
    one.guide = ChainState(50)
    front = lead(engine).launch([StepRow(one, 1)])
    behind = lead(engine).launch([StepRow(one, 1, num_ahead=1)], front)
    with pytest.raises(AssertionError, match="not told to sample"):
        behind.wait()
    with pytest.raises(AssertionError, match="samples once"):
        front.sample()


def test_who_has_finished_is_sampled_without_its_guide_and_its_counts(llama: tuple[Path, Any]) -> None:
    plain, engine = load(llama[0], num_blocks=64), load(llama[0], num_blocks=64, run_ahead="on")
    (guided, counted, goes_on), (*_, alone) = prompts(3), prompts(3)
    guided.guide = ChainState(2)
    counted.sampling = msgspec.structs.replace(counted.sampling, frequency_penalty=0.5)
    begin(engine, [guided, counted, goes_on])
    front = lead(engine).launch([StepRow(one, 1) for one in (guided, counted, goes_on)])
    behind = lead(engine).launch([StepRow(one, 1, num_ahead=1) for one in (guided, counted, goes_on)], front)
    take([guided, counted, goes_on], [1] * 3, tokens_of(front.wait()))
    assert guided.is_over
    counts = [one.counts for one in engine._slots.sequences if one.counts is not None]
    num_counted = [int(one.entries[:, 1].sum()) for one in counts]
    for one in (guided, counted):
        one.set_status(SequenceStatus.RUNNING)
        one.set_status(SequenceStatus.FINISHED)
    behind.sample()
    *_, token = tokens_of(behind.wait())
    assert [int(one.entries[:, 1].sum()) for one in counts] == num_counted
    assert len(counts) == 1
    begin(plain, [alone])
    for _ in range(2):
        (expected,) = take([alone], [1], step(plain, [StepRow(alone, 1)]))
    assert token is not None
    assert token.token_id == expected.token_id
