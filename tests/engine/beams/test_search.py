"""Beam search as a pure function: against all sequences, against a slow reference over whole vocabularies, and its
ends."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.common.sampling import BeamSearch, FinishReason, SampledToken, SamplingParams
from kvrelay.engine.beams.search import FinishedBeam, Search, advance

LogProbs = Callable[[tuple[int, ...]], list[float]]


def language(seed: int, vocab_size: int) -> LogProbs:
    """A random language: the log probability of each next token after any output. Their probabilities sum to one."""

    def log_probs(tokens: tuple[int, ...]) -> list[float]:
        weights = [1.0 + hash((seed, tokens, token)) % 1000 for token in range(vocab_size)]
        return [math.log(weight / sum(weights)) for weight in weights]

    return log_probs


def params(search: BeamSearch, stops: tuple[int, ...] = (), num_logprobs: int | None = None) -> SamplingParams:
    return SamplingParams(
        max_tokens=1, temperature=0.0, stop_token_ids=stops, beam_search=search, num_logprobs=num_logprobs
    )


def sampled(log_probs: LogProbs, tokens: tuple[int, ...], count: int) -> SampledToken:
    """An engine's result for a beam: the likeliest token and ``count`` candidates."""
    ranked = sorted(enumerate(log_probs(tokens)), key=lambda entry: -entry[1])
    return SampledToken(ranked[0][0], ranked[0][1], tuple(ranked[:count]))


def run(log_probs: LogProbs, sampling: SamplingParams, max_tokens: int) -> Search:
    search = Search()
    while not search.is_over:
        outputs = [tuple(token.token_id for token in beam.tokens) for beam in search.live]
        told = [sampled(log_probs, tokens, sampling.num_top_logprobs or 0) for tokens in outputs]
        search = advance(search, told, sampling, max_tokens)
        children = [tuple(token.token_id for token in beam.tokens) for beam in search.live]
        assert [outputs[beam.parent] for beam in search.live] == [tokens[:-1] for tokens in children]
        assert len(set(children)) == len(children), "two beams are the same"
    return search


def texts(beams: tuple[FinishedBeam, ...]) -> list[tuple[int, ...]]:
    return [tuple(token.token_id for token in beam.tokens) for beam in beams]


@dataclass(frozen=True)
class Slow:
    """The same search over all continuations of all beams at every step."""

    log_probs: LogProbs
    vocab_size: int
    sampling: SamplingParams
    max_tokens: int

    def run(self) -> list[tuple[int, ...]]:
        search = self.sampling.beam_search
        assert search is not None
        width, stops = search.width, self.sampling.stop_token_ids
        live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        done: list[tuple[float, tuple[int, ...]]] = []
        for length in range(1, self.max_tokens + 1):
            every = [
                (total + self.log_probs(tokens)[token], (*tokens, token))
                for total, tokens in live
                for token in range(self.vocab_size)
            ]
            every.sort(key=lambda entry: -entry[0])
            ends = [tokens[-1] in stops or length == self.max_tokens for _, tokens in every]
            done += [
                (total / length**search.length_penalty, tokens)
                for (total, tokens), end in list(zip(every, ends, strict=True))[:width]
                if end
            ]
            done = sorted(done, key=lambda entry: -entry[0])[:width]
            live = [one for one, end in zip(every, ends, strict=True) if not end][:width]
            if not live or (len(done) == width and (search.early_stopping is True or width == 1)):
                break
            if len(done) == width:
                far = self.max_tokens if search.early_stopping is None and search.length_penalty > 0 else length
                if live[0][0] / far**search.length_penalty <= done[-1][0]:
                    break
        return [tokens for _, tokens in done]


@given(
    seed=st.integers(0, 10**6),
    vocab_size=st.integers(6, 20),
    width=st.integers(1, 5),
    num_stops=st.integers(0, 4),
    max_tokens=st.integers(1, 9),
    length_penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    early_stopping=st.sampled_from([True, False, None]),
)
@settings(max_examples=300, deadline=None)
def test_few_candidates_of_each_beam_find_what_all_would(
    seed: int,
    vocab_size: int,
    width: int,
    num_stops: int,
    max_tokens: int,
    length_penalty: float,
    early_stopping: bool | None,
) -> None:
    search = BeamSearch(width=width, length_penalty=length_penalty, early_stopping=early_stopping)
    sampling = params(search, tuple(range(num_stops)))
    log_probs = language(seed, vocab_size)
    found = run(log_probs, sampling, max_tokens).finished
    assert texts(found) == Slow(log_probs, vocab_size, sampling, max_tokens).run()


@given(seed=st.integers(0, 10**6), length_penalty=st.sampled_from([0.0, 0.5, 1.0, 2.0]))
@settings(max_examples=50, deadline=None)
def test_a_search_as_wide_as_the_language_finds_the_best_of_all_sequences(seed: int, length_penalty: float) -> None:
    vocab_size, max_tokens, stop = 3, 4, 0
    log_probs = language(seed, vocab_size)
    sampling = params(BeamSearch(width=3**4, length_penalty=length_penalty), (stop,))
    complete = {
        tokens[: tokens.index(stop) + 1] if stop in tokens else tokens
        for tokens in itertools.product(range(vocab_size), repeat=max_tokens)
    }

    def score(tokens: tuple[int, ...]) -> float:
        total = sum(log_probs(tokens[:index])[token] for index, token in enumerate(tokens))
        return float(total / len(tokens) ** length_penalty)

    found = run(log_probs, sampling, max_tokens).finished
    assert texts(found) == sorted(complete, key=lambda tokens: -score(tokens))
    assert [beam.score for beam in found] == pytest.approx([score(tokens) for tokens in texts(found)])
    for beam in found:
        assert beam.finish_reason is (FinishReason.STOP if beam.tokens[-1].token_id == stop else FinishReason.LENGTH)


def candidates(*entries: tuple[int, float]) -> SampledToken:
    return SampledToken(entries[0][0], entries[0][1], entries)


def test_what_ends_outside_of_the_likeliest_is_no_result_and_no_beam() -> None:
    sampling = params(BeamSearch(width=2), (9,))
    first = candidates((1, -0.1), (2, -0.5), (9, -1.0), (3, -2.0))
    search = advance(Search(), [first], sampling, 10)
    assert ([beam.tokens[0].token_id for beam in search.live], search.finished) == ([1, 2], ())
    assert [beam.parent for beam in search.live] == [0, 0]


@pytest.mark.parametrize(("early_stopping", "is_over"), [(True, True), (False, False), (None, False)])
def test_early_stopping_decides_whether_a_better_live_beam_still_counts(
    early_stopping: bool | None, is_over: bool
) -> None:
    sampling = params(BeamSearch(width=2, early_stopping=early_stopping), (8, 9))
    search = advance(Search(), [candidates((1, -0.5), (8, -2.0), (2, -2.5), (9, -9.0))], sampling, 10)
    assert (texts(search.finished), search.is_over) == ([(8,)], False)
    unlikely = candidates((1, -9.0), (2, -9.0), (3, -9.0), (4, -9.0))
    search = advance(search, [candidates((3, -0.1), (9, -0.5), (4, -5.0), (5, -5.0)), unlikely], sampling, 10)
    assert texts(search.finished) == [(1, 9), (8,)]
    assert [beam.score for beam in search.finished] == pytest.approx([-0.5, -2.0])
    assert search.is_over is is_over  # the likeliest live beam has -0.6 after two tokens


def test_never_looks_at_what_the_longest_output_could_still_score() -> None:
    first = candidates((8, -1.0), (9, -1.5), (1, -3.6), (2, -4.0))
    by_now = params(BeamSearch(width=2, early_stopping=False), (8, 9))
    by_then = params(BeamSearch(width=2, early_stopping=None), (8, 9))
    assert advance(Search(), [first], by_now, 10).is_over
    assert not advance(Search(), [first], by_then, 10).is_over  # -3.6 / 10 would still win
    shrinking = params(BeamSearch(width=2, early_stopping=None, length_penalty=-1.0), (8, 9))
    assert advance(Search(), [first], shrinking, 10).is_over


def test_log_probabilities_are_told_if_asked_for() -> None:
    first = candidates((1, -0.1), (2, -0.5), (3, -2.0))
    search = BeamSearch(width=1)
    told = [advance(Search(), [first], params(search, (), count), 1).finished[0].tokens for count in (None, 0, 2)]
    assert told[0] == (SampledToken(1),)
    assert told[1] == (SampledToken(1, -0.1),)
    assert told[2] == (SampledToken(1, -0.1, ((1, -0.1), (2, -0.5))),)


def test_a_step_of_no_search_of_one_that_is_over_or_of_too_few_beams_raises() -> None:
    sampling = params(BeamSearch(width=2))
    first = candidates((1, -0.1), (2, -0.5), (3, -2.0))
    with pytest.raises(ValueError, match="no step of None"):
        advance(Search(), [first], SamplingParams(max_tokens=1), 1)
    with pytest.raises(ValueError, match="over: True"):
        advance(advance(Search(), [first], sampling, 1), [first, first], sampling, 1)
    with pytest.raises(ValueError, match="with 2 live beams"):
        advance(advance(Search(), [first], sampling, 5), [first], sampling, 5)
