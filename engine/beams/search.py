"""Beam search as a pure function: from the live beams and their likeliest next tokens to the next live beams.

The rules are those of Hugging Face transformers (``GenerationMixin._beam_search`` of version 5), and the results are equal. The
``width`` likeliest continuations that do not end are the next live beams. A continuation that ends counts as finished if it is
among the ``width`` likeliest of all. Of the finished ones, the ``width`` with the best scores are kept. This module knows no
blocks, sequences or engine.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kvrelay.common.sampling import BeamSearch, FinishReason, SampledToken, SamplingParams


@dataclass(frozen=True, slots=True)
class LiveBeam:
    """A beam that continues."""

    tokens: tuple[SampledToken, ...]  # of the output
    log_prob: float  # of all its tokens together
    parent: int  # index of the live beam that it continues, in the step before


@dataclass(frozen=True, slots=True)
class FinishedBeam:
    """A beam that ended."""

    tokens: tuple[SampledToken, ...]
    finish_reason: FinishReason
    score: float  # log probability / number of tokens ** length_penalty


@dataclass(frozen=True, slots=True)
class Search:
    """The state of a beam search after a step. It begins with one live beam without tokens."""

    live: tuple[LiveBeam, ...] = (LiveBeam((), 0.0, 0),)  # likeliest first, at most ``width``
    finished: tuple[FinishedBeam, ...] = ()  # best first, at most ``width``
    is_over: bool = False


def advance(search: Search, sampled: Seq[SampledToken], sampling: SamplingParams, max_tokens: int) -> Search:
    """One step. ``sampled``: for each live beam the engine's sample, whose ``top_logprobs`` are the candidates.

    There must be ``sampling.num_top_logprobs`` candidates, or the whole vocabulary. ``max_tokens``: the longest output in tokens.
    Raises ValueError if ``sampling`` asks for no beam search, the search is over, or the number of live beams differs.
    """
    params = sampling.beam_search
    if params is None or search.is_over or len(sampled) != len(search.live):
        raise ValueError(
            f"no step of {params} with {len(search.live)} live beams (over: {search.is_over}), {len(sampled)} given"
        )
    num_tokens = len(search.live[0].tokens) + 1
    live: list[LiveBeam] = []
    finished = list(search.finished)
    for place, (neg_log_prob, parent, rank) in enumerate(_by_log_prob(search, sampled)):
        if place >= params.width and (num_tokens == max_tokens or len(live) == params.width):
            break
        token_id = sampled[parent].top_logprobs[rank][0]
        reason = _finish_reason(token_id, sampling, is_last=num_tokens == max_tokens)
        if reason is not None and place >= params.width:
            continue  # it only serves to leave enough others to continue with
        tokens = (*search.live[parent].tokens, _told(sampled[parent], rank, sampling.num_logprobs))
        if reason is None:
            live.append(LiveBeam(tokens, -neg_log_prob, parent))
        else:
            finished.append(FinishedBeam(tokens, reason, _score(-neg_log_prob, num_tokens, params)))
    finished.sort(key=lambda beam: -beam.score)
    del finished[params.width :]
    return Search(tuple(live), tuple(finished), _is_over(live, finished, params, num_tokens, max_tokens))


def _by_log_prob(search: Search, sampled: Seq[SampledToken]) -> Iterator[tuple[float, int, int]]:
    """All continuations as (minus their log probability, live beam, rank among its candidates), likeliest first.

    Each beam's candidates are already sorted, so this merges them lazily.
    """

    def of_beam(index: int) -> Iterator[tuple[float, int, int]]:
        log_prob = search.live[index].log_prob
        for rank, (_, token_log_prob) in enumerate(sampled[index].top_logprobs):
            yield -(log_prob + token_log_prob), index, rank

    return heapq.merge(*map(of_beam, range(len(sampled))))


def _finish_reason(token_id: int, sampling: SamplingParams, *, is_last: bool) -> FinishReason | None:
    if token_id in sampling.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if is_last else None


def _told(sampled: SampledToken, rank: int, num_logprobs: int | None) -> SampledToken:
    """The candidate as an output token, with as many log probabilities as the client asked for."""
    token_id, log_prob = sampled.top_logprobs[rank]
    if num_logprobs is None:
        return SampledToken(token_id)
    return SampledToken(token_id, log_prob, sampled.top_logprobs[:num_logprobs])


def _score(log_prob: float, num_tokens: int, params: BeamSearch) -> float:
    return log_prob / math.pow(num_tokens, params.length_penalty)


def _is_over(
    live: Seq[LiveBeam], finished: Seq[FinishedBeam], params: BeamSearch, num_tokens: int, max_tokens: int
) -> bool:
    if num_tokens == max_tokens or not live:
        return True
    if len(finished) < params.width:
        return False
    # A search of one beam is greedy, and ends where greedy decoding ends.
    if params.early_stopping is True or params.width == 1:
        return True
    # The best score that the likeliest live beam can still reach: at its present length or, for "never", at the best
    # possible length.
    suits_long = params.early_stopping is None and params.length_penalty > 0
    best_possible = _score(live[0].log_prob, max_tokens if suits_long else num_tokens, params)
    return best_possible <= finished[-1].score
