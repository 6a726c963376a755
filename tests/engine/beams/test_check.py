"""Beam searches that a worker refuses: out of range, contradictory, or too large for the worker or the answer's
message."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from kvrelay.common.model_card import ModelCard
from kvrelay.common.sampling import BeamSearch, FinishReason, Guide, GuideKind, SampledToken, SamplingParams, Watermark
from kvrelay.engine.beams.check import _EXCLUDED, invalid_beams, invalid_first_token, unfit_beams
from kvrelay.engine.fake.engine import fake_card
from kvrelay.wire.messages import Beam, FailureCode, Status, Submit, TokenDelta, Tokens, WorkerState
from kvrelay.worker.submit import WorkerIdentity, invalid_submit, refusal_of

CARD = fake_card(num_blocks=64, block_size=4, max_model_len=200, vocab_size=1000)


def submit(search: BeamSearch, num_prompt_tokens: int = 6, num_replayed: int = 0, **sampling: Any) -> Submit:
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "beam_search": search, **sampling})
    token_ids = list(range(num_prompt_tokens + num_replayed))
    return Submit(request_id="r", attempt=1, token_ids=token_ids, num_prompt_tokens=num_prompt_tokens, sampling=params)


def invalid(request: Submit, card: ModelCard) -> str | None:
    return invalid_beams(request.sampling, request.num_prompt_tokens, len(request.token_ids), card)


def unfit(request: Submit, card: ModelCard, max_running: int) -> str | None:
    return unfit_beams(request.sampling, request.num_prompt_tokens, card, max_running)


@pytest.mark.parametrize(
    ("search", "detail"),
    [
        (BeamSearch(width=0), "beam_search.width is 0; it must be 1 to 128"),
        (BeamSearch(width=129), "beam_search.width is 129; it must be 1 to 128"),
        (BeamSearch(width=4, num_return=5), "beam_search.num_return is 5; it must be 1 to the width, 4"),
        (BeamSearch(width=4, num_return=0), "beam_search.num_return is 0; "),
        (BeamSearch(width=4, length_penalty=math.nan), "beam_search.length_penalty is nan; it must be -16 to 16"),
        (BeamSearch(width=4, length_penalty=-17.0), "beam_search.length_penalty is -17.0; "),
    ],
)
def test_values_out_of_range_are_named_with_their_limits(search: BeamSearch, detail: str) -> None:
    found = invalid_submit(submit(search), CARD)
    assert found is not None
    assert found.startswith(detail)


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_k": 5},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"typical_p": 0.9},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"min_tokens": 2},
        {"logit_bias": ((1, 2.0),)},
        {"allowed_token_ids": (1, 2)},
        {"bad_words": ((1,),)},
        {"guide": Guide(kind=GuideKind.REGEX, text="a*")},
        {"watermark": Watermark()},
        {"processors": ("mine",)},
        {"temperature": 0.7},
    ],
)
def test_what_a_search_goes_without_is_named(sampling: dict[str, Any]) -> None:
    (name,) = sampling
    detail = invalid(submit(BeamSearch(width=2), **sampling), CARD)
    assert detail is not None
    assert detail.startswith(f"beam_search goes without {name}")


def test_every_field_that_changes_a_choice_is_excluded() -> None:
    """A new field of SamplingParams must be added to one of these sets."""
    allowed = {"max_tokens", "temperature", "seed", "stop_token_ids", "num_logprobs", "choice", "num_prompt_logprobs"}
    assert set(SamplingParams.__struct_fields__) == allowed | {"beam_search"} | set(_EXCLUDED)


def test_a_search_that_is_right_is_taken() -> None:
    for temperature in (0.0, 1.0):
        search = BeamSearch(width=4, num_return=4, length_penalty=0.5, early_stopping=None)
        request = submit(search, temperature=temperature, num_logprobs=5, stop_token_ids=(1, 2))
        assert invalid_submit(request, CARD) is None
        assert unfit(request, CARD, 4) is None


def test_a_search_does_not_start_behind_output() -> None:
    detail = invalid(submit(BeamSearch(width=2), num_replayed=3), CARD)
    assert detail == "a beam search starts at the prompt, not behind 3 tokens"


def test_a_result_must_fit_its_message() -> None:
    """The largest accepted answer fits one message, even with the longest encoding of tokens and log probabilities."""
    card = fake_card(num_blocks=2**16, max_model_len=2**16)
    most = submit(BeamSearch(width=128, num_return=128), max_tokens=2**12)
    assert invalid(most, card) is None
    detail = invalid(submit(BeamSearch(width=128, num_return=128), max_tokens=2**12 + 1), card)
    assert detail is not None
    assert "at most 524288 travel in one answer: lower max_tokens" in detail
    told = submit(BeamSearch(width=2, num_return=2), max_tokens=2**15, num_logprobs=6)
    assert invalid(told, card) is None
    top = tuple((131_071, -math.pi) for _ in range(6))
    tokens = [SampledToken(131_071, -math.pi, top)] * 2**15
    beam = Beam(tokens=tokens, finish_reason=FinishReason.LENGTH, score=-math.pi)
    answer = Tokens(items=[TokenDelta(request_id="r", attempt=1, index=0, tokens=[], beams=[beam, beam])])
    assert len(msgspec.msgpack.encode(answer)) < 2**24


def test_what_does_not_fit_a_decode_worker_even_alone_is_refused_there() -> None:
    search = BeamSearch(width=8)
    # Beams share the prompt's full block. Two tokens of the prompt and 26 of the output take 7 blocks in each beam.
    assert unfit(submit(search, max_tokens=26), CARD, 8) is None
    assert unfit(submit(search, max_tokens=27), CARD, 8) == (
        "8 beams of up to 27 tokens need 65 KV blocks; this worker has 64: lower max_tokens or beam_search.width"
    )
    assert unfit(submit(BeamSearch(width=1), max_tokens=10**6), CARD, 8) is None  # the model's length limits it
    detail = unfit(submit(search), CARD, 7)
    assert detail == "beam_search.width is 8; this worker runs 7 sequences at a time (--max-num-seqs)"
    assert (
        unfit(
            Submit(
                request_id="r", attempt=1, token_ids=[1], num_prompt_tokens=1, sampling=SamplingParams(max_tokens=5)
            ),
            CARD,
            1,
        )
        is None
    )


@pytest.mark.parametrize("is_prefill", [True, False])
def test_only_the_worker_that_would_search_minds_its_room(is_prefill: bool) -> None:
    identity = WorkerIdentity("w", 1, CARD, 10, 4)
    status = Status(
        state=WorkerState.READY,
        num_running=0,
        num_waiting=0,
        num_waiting_tokens=0,
        num_free_blocks=64,
        num_blocks=64,
        max_running=4,
    )
    request = submit(BeamSearch(width=8))
    refusal = refusal_of(request, identity, status, is_known=False, decodes=not is_prefill)
    assert refusal is not None
    assert refusal.code is FailureCode.INVALID
    assert ("--max-num-seqs" in refusal.detail) is not is_prefill


@pytest.mark.parametrize(
    ("token", "detail"),
    [
        (SampledToken(1000), "the first token is 1000; it must be 0 to 999"),
        (SampledToken(1, -0.1, ((1, -0.1), (-1, -0.2), (3, -0.3))), "the first token is -1; it must be 0 to 999"),
        (SampledToken(1), "0 candidates came for the first token; a beam search needs 3 here"),
        (SampledToken(1, -0.1, ((1, -0.1), (2, -0.2), (3, -0.3))), None),
    ],
)
def test_a_search_goes_on_from_enough_candidates_of_the_vocabulary_only(
    token: SampledToken, detail: str | None
) -> None:
    sampling = SamplingParams(max_tokens=5, beam_search=BeamSearch(width=2), stop_token_ids=(9,))
    assert invalid_first_token(token, sampling, 1000) == detail
    assert invalid_first_token(SampledToken(1), SamplingParams(max_tokens=5), 1000) is None
