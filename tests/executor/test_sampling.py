"""Sampling parameters as a request body: only given values are sent, and the gateway's schema understands all of them."""

from __future__ import annotations

import json
import math

import pytest

from kvrelay.common.retention import Retention
from kvrelay.common.sampling import BeamSearch, GuideKind
from kvrelay.executor.request import Chat, Request, as_request, encode_body
from kvrelay.executor.sampling import SamplingParams, StructuredOutputsParams
from kvrelay.gateway.apis.openai.bodies import CompletionBody
from kvrelay.gateway.errors import InvalidRequestError
from kvrelay.gateway.http.request import parse_body
from kvrelay.gateway.relay.request import GenerationSpec


def spec_of(params: SamplingParams, *, stream: bool = False) -> GenerationSpec:
    """The parameters as the gateway reads them."""
    body = parse_body(CompletionBody, None, encode_body(Request("x", params).body("x", stream=stream)))
    return body.spec(max_tokens=body.max_tokens, num_logprobs=body.logprobs)


def test_defaults_say_nothing_but_the_length() -> None:
    assert SamplingParams().body() == {"max_tokens": 16}
    assert spec_of(SamplingParams()) == GenerationSpec(max_tokens=16)
    assert spec_of(SamplingParams(max_tokens=None)) == GenerationSpec()


def test_every_parameter_arrives() -> None:
    params = SamplingParams(
        n=2, best_of=3, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, typical_p=0.8, repetition_penalty=1.1,
        presence_penalty=0.2, frequency_penalty=-0.3, seed=5, max_tokens=20, min_tokens=3, stop=("a", "b"),
        stop_token_ids=(4,), include_stop_str_in_output=True, ignore_eos=True, bad_words=("bad",), logit_bias={3: -1.5},
        allowed_token_ids=(1, 2, 3), logprobs=0, prompt_logprobs=1, structured_outputs=StructuredOutputsParams(regex="[ab]+"),
        watermark=True, logits_processors=("mine",), skip_special_tokens=False, truncate_prompt_tokens=9,
    )  # fmt: skip
    spec = spec_of(params)
    assert spec.guide is not None
    assert (spec.guide.kind, spec.guide.text) == (GuideKind.REGEX, "[ab]+")
    assert spec == GenerationSpec(
        num_choices=2, best_of=3, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, typical_p=0.8, repetition_penalty=1.1,
        presence_penalty=0.2, frequency_penalty=-0.3, seed=5, max_tokens=20, min_tokens=3, stops=("a", "b"),
        stop_token_ids=(4,), includes_stop=True, ignore_eos=True, bad_words=("bad",), logit_bias=((3, -1.5),),
        allowed_token_ids=(1, 2, 3), num_logprobs=0, num_prompt_logprobs=1, guide=spec.guide,
        guide_param="structured_outputs.regex",
        has_watermark=True, processors=("mine",), keeps_special=True, truncate=9,
    )  # fmt: skip


def test_what_a_request_says_beside() -> None:
    request = Request("x", priority=-2, cache_priority=80, cache_ttl=5.0)
    body = parse_body(CompletionBody, None, encode_body(request.body("x", stream=False)))
    spec = body.spec(max_tokens=None, num_logprobs=None)
    assert (spec.priority, spec.retention) == (-2, Retention(priority=80, ttl_s=5.0))


def test_beams() -> None:
    spec = spec_of(SamplingParams(n=2, use_beam_search=True, beam_width=4, length_penalty=0.5, early_stopping="never"))
    assert spec.beam_search == BeamSearch(width=4, num_return=2, length_penalty=0.5, early_stopping=None)


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        (StructuredOutputsParams(json={"type": "object"}), GuideKind.JSON_SCHEMA, {"type": "object"}),
        (StructuredOutputsParams(json='{"type": "object"}'), GuideKind.JSON_SCHEMA, {"type": "object"}),
        (StructuredOutputsParams(choice=("yes", "no")), GuideKind.CHOICE, ["yes", "no"]),
        (StructuredOutputsParams(json_object=True), GuideKind.JSON_OBJECT, None),
    ],
)
def test_structured_outputs(given: StructuredOutputsParams, kind: GuideKind, text: object) -> None:
    guide = spec_of(SamplingParams(structured_outputs=given)).guide
    assert guide is not None
    assert guide.kind is kind
    assert (json.loads(guide.text) if guide.text else None) == text


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(temperature=math.nan), "temperature"),
        (SamplingParams(temperature=3.0), "temperature"),
        (SamplingParams(top_p=-math.inf), "top_p"),
        (SamplingParams(n=0), "n"),
        (SamplingParams(n=True), "n"),
        (SamplingParams(max_tokens=-1), "max_tokens"),
        (SamplingParams(logit_bias={-1: 1.0}), "logit_bias"),
        (SamplingParams(beam_width=2), "beam_width"),
        (SamplingParams(structured_outputs=StructuredOutputsParams(regex="a", grammar="b")), "structured_outputs"),
        (SamplingParams(seed="five"), "seed"),  # type: ignore[arg-type]
    ],
)
def test_what_is_wrong_is_named(params: SamplingParams, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        spec_of(params)
    assert caught.value.param == field
    assert params.num_outputs == 1


def test_streams_refuse_what_is_known_at_the_end_only() -> None:
    with pytest.raises(InvalidRequestError, match="best_of"):
        spec_of(SamplingParams(best_of=2), stream=True)


def test_what_json_cannot_carry_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="JSON"):
        encode_body(SamplingParams(seed=object()).body())  # type: ignore[arg-type]


def test_prompts_in_all_forms() -> None:
    chat = Chat([{"role": "user", "content": "hi"}])
    assert as_request("text", None) == Request("text")
    assert as_request((1, 2), SamplingParams(n=2)) == Request([1, 2], SamplingParams(n=2))
    assert as_request(range(3), None).prompt == [0, 1, 2]
    assert as_request(chat, None).prompt == chat
    assert as_request(Request((1,), priority=3), None) == Request([1], priority=3)


@pytest.mark.parametrize("prompt", [["a", "b"], [1.5], None, {"text": "x"}, [[1], [2]], b"bytes".hex])
def test_what_is_no_prompt(prompt: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        as_request(prompt, None)  # type: ignore[arg-type]
    assert caught.value.param == "prompt"


def test_parameters_come_once() -> None:
    with pytest.raises(InvalidRequestError, match="beside a Request"):
        as_request(Request("x"), SamplingParams())


@pytest.mark.parametrize(
    "wrong", [{"request_id": "with space"}, {"request_id": ""}, {"timeout_s": 0}, {"timeout_s": math.nan}]
)
def test_a_requests_own_fields(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Request("x", **wrong)  # type: ignore[arg-type]
    assert caught.value.param in wrong


def test_a_chats_body() -> None:
    chat = Chat([{"role": "user", "content": "hi"}], continue_final_message=True, chat_template_kwargs={"a": 1})
    assert chat.body() == {
        "messages": [{"role": "user", "content": "hi"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "chat_template_kwargs": {"a": 1},
    }
    assert Chat([]).body() == {"messages": []}
