"""What a worker refuses before anything else sees it: values that would break a step, and with it everybody in the batch."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.fake import fake_card
from kvrelay.wire.messages import Submit
from kvrelay.wire.submit import invalid_submit


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
    ],
)
def test_sampling_that_would_break_a_step_is_refused(sampling: dict[str, Any]) -> None:
    (name,) = sampling
    detail = invalid_submit(submit(**sampling), fake_card())
    assert detail is not None
    assert detail.startswith(f"{name} is ")


@pytest.mark.parametrize(
    "sampling", [{}, {"top_k": 0}, {"num_logprobs": 20}, {"temperature": 2.0}, {"seed": 2**64 - 1}]
)
def test_what_gateways_send_is_taken(sampling: dict[str, Any]) -> None:
    assert invalid_submit(submit(**sampling), fake_card()) is None
