"""A worker refuses requests whose values would break a step, and with it every sequence in the batch."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from kvrelay.common.retention import Retention
from kvrelay.common.sampling import BeamSearch, SamplingParams, Watermark
from kvrelay.engine.fake.engine import fake_card
from kvrelay.wire.messages import Submit
from kvrelay.worker.submit import invalid_submit


def submit(**sampling: Any) -> Submit:
    params = SamplingParams(**{"max_tokens": 5, **sampling})
    return Submit(request_id="r", attempt=1, token_ids=[1, 2], num_prompt_tokens=2, sampling=params)


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_k": -(2**63)},
        {"top_k": 2**31},
        {"num_logprobs": -1},
        {"max_tokens": -5},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 1e308},
        {"repetition_penalty": -math.inf},
        {"repetition_penalty": 0.0},
        {"num_prompt_logprobs": -1},
        {"min_tokens": -1},
        {"choice": 2**31},
        {"typical_p": math.nan},
    ],
)
def test_sampling_that_would_break_a_step_is_refused(sampling: dict[str, Any]) -> None:
    (name,) = sampling
    detail = invalid_submit(submit(**sampling), fake_card())
    assert detail is not None
    assert detail.startswith(f"{name} is ")


@pytest.mark.parametrize(
    ("sampling", "detail"),
    [
        ({"logit_bias": ((5, math.inf),)}, "logit_bias is inf; it must be -1e+06 to 1e+06"),
        ({"logit_bias": ((5, 1.0), (1000, 1.0))}, "logit_bias has token 1000; a token id must be 0 to 999"),
        ({"allowed_token_ids": (3, -1)}, "allowed_token_ids has token -1; "),
        ({"allowed_token_ids": (3,) * 4097}, "allowed_token_ids has 4097 tokens; it must have at most 4096"),
        ({"bad_words": ((3,), ())}, "bad_words has an empty one"),
        ({"bad_words": ((3, 1000),)}, "bad_words has token 1000; "),
        ({"watermark": Watermark(gamma=1.0)}, "watermark.gamma is 1.0; it must lie between 0 and 1"),
        ({"watermark": Watermark(gamma=math.nan)}, "watermark.gamma is nan; "),
        ({"watermark": Watermark(delta=math.inf)}, "watermark.delta is inf; "),
        ({"beam_search": BeamSearch(width=0)}, "beam_search.width is 0; it must be 1 to "),
        ({"beam_search": BeamSearch(width=2**40)}, "beam_search.width is "),
        (
            {"beam_search": BeamSearch(width=2, num_return=3)},
            "beam_search.num_return is 3; it must be 1 to the width, 2",
        ),
        ({"beam_search": BeamSearch(width=2, length_penalty=math.nan)}, "beam_search.length_penalty is nan; "),
        ({"processors": ("a", "c")}, "processors has 'c', which this worker was not started with; it has: a, b"),
        ({"processors": ("a", "a")}, "processors is a, a; each may be there once"),
        (
            {"num_prompt_logprobs": 2**17},
            "num_prompt_logprobs is 131072 for 2 tokens of prompt: 262146 log probabilities; at",
        ),
    ],
)
def test_what_cannot_be_applied_is_refused(sampling: dict[str, Any], detail: str) -> None:
    found = invalid_submit(submit(**sampling), fake_card(processors=("a", "b")))
    assert found is not None
    assert found.startswith(detail)


def test_a_worker_without_processors_says_so() -> None:
    assert str(invalid_submit(submit(processors=("a",)), fake_card())).endswith("it has: none")


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"top_k": 0},
        {"num_logprobs": 20},
        {"temperature": 2.0},
        {"seed": 2**64 - 1},
        {"typical_p": 0.0, "choice": 127, "min_tokens": 5},
        {"logit_bias": ((0, -100.0), (999, 100.0)), "allowed_token_ids": (0, 999), "bad_words": ((0,), (1, 999))},
        {"watermark": Watermark(), "processors": ("b", "a")},
        {"beam_search": BeamSearch(width=8, num_return=8, length_penalty=-1.0)},
        {"num_prompt_logprobs": 2**17 - 1},
        {"stop_token_ids": (5000,)},
    ],
)
def test_what_gateways_send_is_taken(sampling: dict[str, Any]) -> None:
    assert invalid_submit(submit(**sampling), fake_card(processors=("a", "b"))) is None


def test_a_cache_salt_has_a_bound() -> None:
    wrong = msgspec.structs.replace(submit(), cache_salt="x" * 257)
    assert invalid_submit(wrong, fake_card()) == "cache_salt has 257 characters; it must have at most 256"
    assert invalid_submit(msgspec.structs.replace(submit(), cache_salt="x" * 256), fake_card()) is None


def test_retention_out_of_its_range_is_refused() -> None:
    wrong = msgspec.structs.replace(submit(), retention=Retention(priority=101))
    assert invalid_submit(wrong, fake_card()) == "retention.priority is 101; it must be 0 to 100"
    right = msgspec.structs.replace(submit(), retention=Retention(priority=100, ttl_s=60.0))
    assert invalid_submit(right, fake_card()) is None


def test_what_nobody_asks_for_is_not_sent() -> None:
    assert b"retention" not in msgspec.msgpack.encode(submit())
    asked = msgspec.structs.replace(submit(), retention=Retention(priority=80))
    sent = msgspec.msgpack.encode(asked)
    assert b"ttl_s" not in sent
    assert msgspec.msgpack.decode(sent, type=Submit) == asked
