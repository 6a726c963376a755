"""TGI's parameters as sampling settings: when tokens are sampled, and how grammars become guides."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrelay.common.sampling import Guide, GuideKind
from kvrelay.gateway.apis.tgi.routes import GenerateBody
from kvrelay.gateway.relay.request import GenerationSpec


def spec_of(parameters: dict[str, Any] | None, *, is_stream: bool = False) -> GenerationSpec:
    body = {"inputs": "x"} if parameters is None else {"inputs": "x", "parameters": parameters}
    return GenerateBody.model_validate_json(json.dumps(body)).wanted.spec(is_stream=is_stream)


@pytest.mark.parametrize(
    ("parameters", "temperature"),
    [
        ({}, 0.0),
        (None, 1.0),  # TGI samples for a body without parameters
        ({"do_sample": False}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"temperature": 1.0}, 0.0),  # TGI's default: still greedy
        ({"temperature": 0.7}, 0.7),
        ({"temperature": 0.7, "do_sample": False}, 0.7),
        ({"top_k": 5}, 1.0),
        ({"top_p": 0.9}, 1.0),
        ({"typical_p": 0.9}, 1.0),
        ({"seed": 4}, 0.0),
        ({"repetition_penalty": 1.3}, 0.0),
        ({"watermark": True}, 0.0),
    ],
)
def test_when_tokens_are_drawn(parameters: dict[str, Any] | None, temperature: float) -> None:
    assert spec_of(parameters).temperature == temperature


def test_every_parameter_arrives() -> None:
    spec = spec_of(
        {
            "temperature": 0.5,
            "top_k": 7,
            "top_p": 0.8,
            "typical_p": 0.6,
            "repetition_penalty": 1.2,
            "frequency_penalty": 0.4,
            "max_new_tokens": 9,
            "stop": ["a", "", "b"],
            "truncate": 3,
            "watermark": True,
            "seed": 11,
            "top_n_tokens": 4,
            "decoder_input_details": True,
            "adapter_id": None,
            "unknown": 1,
        }
    )
    assert spec == GenerationSpec(
        temperature=0.5,
        top_k=7,
        top_p=0.8,
        typical_p=0.6,
        repetition_penalty=1.2,
        frequency_penalty=0.4,
        max_tokens=9,
        max_tokens_param="max_new_tokens",
        stops=("a", "b"),
        includes_stop=True,
        truncate=3,
        has_watermark=True,
        seed=11,
        num_logprobs=4,
        num_prompt_logprobs=0,
    )


SCHEMA = {"type": "object", "properties": {"schema": {"type": "string"}}}


@pytest.mark.parametrize(
    ("grammar", "guide"),
    [
        ({"type": "json", "value": SCHEMA}, Guide(kind=GuideKind.JSON_SCHEMA, text=json.dumps(SCHEMA))),
        ({"type": "json", "value": json.dumps(SCHEMA)}, Guide(kind=GuideKind.JSON_SCHEMA, text=json.dumps(SCHEMA))),
        ({"type": "json_schema", "value": SCHEMA}, Guide(kind=GuideKind.JSON_SCHEMA, text=json.dumps(SCHEMA))),
        (
            {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}},
            Guide(kind=GuideKind.JSON_SCHEMA, text=json.dumps(SCHEMA)),
        ),
        ({"type": "regex", "value": "[0-9]+"}, Guide(kind=GuideKind.REGEX, text="[0-9]+")),
    ],
)
def test_grammars(grammar: dict[str, Any], guide: Guide) -> None:
    assert spec_of({"grammar": grammar}).guide == guide
