"""Fields that are refused by name: out of range, contradictory, not possible for the model, or not supported."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from kvrelay.gateway.apis.anthropic.routes import MessageBody
from kvrelay.gateway.apis.openai.bodies import ChatBody, CompletionBody
from kvrelay.gateway.apis.openai.output_format import requested_guide
from kvrelay.gateway.apis.responses.routes import ResponseBody
from kvrelay.gateway.apis.tgi.routes import GenerateBody
from kvrelay.gateway.apis.tokenize import DetokenizeBody
from kvrelay.gateway.errors import InvalidRequestError

from ..http_app import CHAT, TEXT, App, app_for
from ..players import good

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
    TEXT: {"prompt": "x"},
    RESPONSES: {"input": "x"},
    MESSAGES: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
    "/detokenize": {},
}
BEAMS = {"use_beam_search": True}
TOOLS = [{"type": "function", "function": {"name": "weather"}}]
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}

NO_NUMBERS: Sequence[Any] = (math.nan, math.inf, -math.inf, "1", [1])
OUTSIDE: Mapping[str, Sequence[Any]] = {
    "temperature": (-0.01, 2.01, *NO_NUMBERS),
    "top_p": (0, 1.01, *NO_NUMBERS),
    "min_p": (-0.01, 1.01, *NO_NUMBERS),
    "typical_p": (0, 1.01, *NO_NUMBERS),
    "repetition_penalty": (0, 10.1, *NO_NUMBERS),
    "presence_penalty": (-2.01, 2.01, *NO_NUMBERS),
    "frequency_penalty": (-2.01, 2.01, *NO_NUMBERS),
    "length_penalty": (-10.1, 10.1, *NO_NUMBERS),
    "cache_ttl": (0, 86_401, *NO_NUMBERS),
    "logit_bias": ({"1": -100.1}, {"1": 100.1}, {"1": math.nan}, {str(key): 1 for key in range(1025)}),
    "n": (0, 129, 1.5, "1"),
    "best_of": (0, 129),
    "max_tokens": (-1, 1.5, "1"),
    "min_tokens": (-1,),
    "top_k": (-2, 2**31),
    "seed": (-(2**63) - 1, 2**63),
    "prompt_logprobs": (-1, 21),
    "truncate_prompt_tokens": (0,),
    "beam_width": (0, 65),
    "priority": (-1001, 1001),
    "cache_priority": (-1, 101),
    "cache_salt": ("", "x" * 257, "\n"),
    "stop": (["x"] * 17, [1], "x" * 1025, ["x" * 1025]),
    "stop_token_ids": ([-1], [2**31], [1] * 257),
    "allowed_token_ids": ([], [-1], [1.5], [1] * 4097),
    "bad_words": (["x"] * 257,),
    "logits_processors": (["x"] * 17, [""], ["x" * 65]),
}
OUTSIDE_TEXTS: Mapping[str, Sequence[Any]] = {"logprobs": (-1, 21), "prompt": ([], [[]], ["x"] * 129, [-1] * 1_000_000)}
OUTSIDE_CHATS: Mapping[str, Sequence[Any]] = {"top_logprobs": (-1, 21), "max_completion_tokens": (-1,)}
OUTSIDE_RESPONSES: Mapping[str, Sequence[Any]] = {
    **{name: OUTSIDE[name] for name in ("temperature", "top_p", "seed", "cache_salt")},
    "max_output_tokens": (0,),
    "top_logprobs": (-1, 21),
    "input": ([],),
}

# By path: fields that are added to a valid body, the field that the error names, and its text.
Case = tuple[dict[str, Any], str, str]
OF_TEXTS: list[Case] = [
    *(({"n": 3, "best_of": best_of, **more}, "best_of", "less than n") for best_of in (1, 2) for more in ({}, BEAMS)),
    ({"best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
    ({**BEAMS, "stream": True}, "use_beam_search", "cannot be streamed"),
    ({**BEAMS, "beam_width": 2, "n": 3}, "beam_width", "less than n"),
    ({**BEAMS, "stop": "x"}, "stop", "together"),
    *(
        ({**BEAMS, name: value}, name, "together")
        for name, value in {
            "temperature": 0.5,
            "top_k": 5,
            "top_p": 0.5,
            "min_p": 0.5,
            "typical_p": 0.5,
            "repetition_penalty": 1.5,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "logit_bias": {"5": 1},
            "allowed_token_ids": [5],
            "bad_words": ["x"],
            "watermark": True,
            "min_tokens": 2,
            "prompt_logprobs": 1,
            "ignore_eos": True,
            "guided_choice": ["a"],
            "response_format": {"type": "json_object"},
            "structured_outputs": {"json": {}},
        }.items()
    ),
    *(
        ({name: value}, name, "use_beam_search is not true")
        for name, value in {"length_penalty": 0.5, "beam_width": 2, "early_stopping": True}.items()
    ),
    ({"max_tokens": 10**30}, "max_tokens", "together more than"),
    ({"min_tokens": 10**30}, "min_tokens", "more than the 16"),
    ({"max_tokens": 3, "min_tokens": 4}, "min_tokens", "more than the 3"),
    *(
        ({"max_tokens": 0, **fields}, "max_tokens", "nothing to choose")
        for fields in ({"best_of": 2}, BEAMS, {"guided_regex": "a"})
    ),
    ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"300": 1}}, "logit_bias", "0 to 299"),
    ({"stop_token_ids": [300]}, "stop_token_ids", "0 to 299"),
    ({"allowed_token_ids": [300]}, "allowed_token_ids", "0 to 299"),
    ({"prompt": [1, 300]}, "prompt", "0 to 299"),
    ({"logits_processors": ["loud"]}, "logits_processors", "there are none"),
    ({"guided_regex": "a", "structured_outputs": {"json": {}}}, "structured_outputs", "together"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "together"),
    ({"structured_outputs": {"yaml": {}}}, "structured_outputs", "has no 'yaml'"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema must be an object"),
    *(
        ({"response_format": given}, "response_format", "it must be text")
        for given in ({"type": "xml"}, {"type": "json"}, {})
    ),
    ({"guided_choice": []}, "guided_choice", "1 to 1024 strings"),
    ({"guided_json": "{"}, "guided_json", "not JSON"),
    ({"guided_json_object": 1}, "guided_json_object", "must be true"),
    ({"guided_json": '{"properties":{"a":' * 5000 + "1" + "}}" * 5000}, "guided_json", "guided_json is"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream is not true"),
    ({"service_tier": "gold"}, "service_tier", "'auto', 'default', 'fast', 'flex', 'priority' or 'scale'"),
    *(
        ({name: value}, name, "not supported")
        for name, value in {
            "suffix": "x",
            "functions": [{"name": "f"}],
            "audio": {"voice": "x"},
            "chat_template": "{{ messages }}",
            "web_search_options": {},
            "prediction": {"type": "content", "content": "x"},
            "lora_request": {"lora_name": "x"},
            "kv_transfer_params": {"x": 1},
        }.items()
    ),
]
OF_CHATS: list[Case] = [
    ({"top_logprobs": 2}, "top_logprobs", "logprobs=true"),
    ({"logprobs": False, "top_logprobs": 2}, "top_logprobs", "logprobs=true"),
    ({"tool_choice": "required"}, "tool_choice", "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "required", **BEAMS}, "tools", "together"),
    ({"max_completion_tokens": 10**30}, "max_completion_tokens", "together more than"),
    ({"messages": []}, "messages", "messages is an empty list"),
    ({"messages": [{"role": "user", "content": "relay " * 900}]}, "messages", "512"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0]", "'king'; it must be one of system, developer"),
    ({"messages": [{"content": "x"}]}, "messages[0]", "messages[0] has no role; it must be one of system, developer"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "messages[0] has no content; give it a text"),
    ({"messages": [{"role": "system", "content": None}]}, "messages[0].content", "messages[0] has no content"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content", "a text or a list of text parts, not '7'"),
    (
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        "messages[0].content[0]",
        "it is not https://HOST/PATH; or send the image itself",
    ),
    ({"reasoning_effort": "hugest"}, "reasoning_effort", "'low', 'medium', 'high'"),
]
OF_RESPONSES: list[Case] = [
    ({"input": [{"type": "web_search_call"}]}, "input[0]", "function_call_output"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "has no image_url"),
    ({"input": [{"type": "function_call", "name": "x"}]}, "input[0]", "arguments"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "whole conversation"),
    ({"background": True}, "background", "not supported"),
    ({"text": {"format": {"type": "json_schema"}}}, "text", "no schema"),
    ({"text": {"format": {"type": "bogus"}}}, "text", "text.format"),
    ({"max_output_tokens": 9999}, "max_output_tokens", "512"),
    ({"tool_choice": "required"}, "tool_choice", "tool_choice"),
]


def _outside(fields: Mapping[str, Sequence[Any]]) -> list[Case]:
    return [({name: value}, name, "") for name, values in fields.items() for value in values]


@pytest.mark.parametrize(
    ("path", "cases"),
    [
        (TEXT, _outside({**OUTSIDE, **OUTSIDE_TEXTS}) + OF_TEXTS),
        (CHAT, _outside(OUTSIDE_CHATS) + OF_CHATS),
        (RESPONSES, _outside(OUTSIDE_RESPONSES) + OF_RESPONSES),
        ("/detokenize", _outside({"tokens": ([-1], [2**31], [1.5])})),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(model_directory: Path, path: str, cases: list[Case]) -> None:
    async with app_for(model_directory, good, max_body_bytes=8_000_000) as app:
        for fields, param, text in cases:
            # With NaN and Infinity, as Python's clients send them.
            content = json.dumps({**BODIES[path], **fields})
            async with asyncio.timeout(60):
                answer = await app.client.post(path, content=content, headers={"content-type": "application/json"})
            shown = f"{content[:100]}: {answer.text[:400]}"
            assert answer.status_code == 400, shown
            error = answer.json()["error"]
            assert (error["param"], error["type"]) == (param, "invalid_request_error"), shown
            assert text in error["message"], shown
            assert len(error["message"]) < 400
        assert not app.player.submits


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_k": -1}, "top_k"),
        ({"temperature": 2.1}, "temperature"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"stop_sequences": ["x" * 1025]}, "at most 1024 characters"),
        ({"messages": []}, "messages is an empty list"),
        ({"thinking": {"type": "always"}}, "thinking.type"),
        ({"system": [{"type": "image", "source": {}}]}, "system[0] is an image; images may be in messages of users"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type is 'web_search_20250305'"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type is 'array'"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        (
            {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "g"}},
            "'g', which is not",
        ),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format must be"),
        ({"mcp_servers": [{"url": "https://x"}]}, "mcp_servers"),
        *(
            ({"messages": [{"role": role, "content": content}]}, text)
            for role, content, text in (
                ("tool", "x", "messages[0].role is 'tool'"),
                ("user", [], "messages[0].content must be a text or a list of blocks"),
                ("user", [{"type": "image", "source": {}}], "content[0].source is of type 'None'"),
                ("user", [{"type": "tool_use"}], "content[0].type is 'tool_use'"),
                ("user", ["x"], "messages[0].content[0] must be a block, an object with a type, not 'x'"),
                ("user", [{"type": "text"}], "content[0] must be a text part"),
                ("user", [{"type": "tool_result", "content": "x"}], "content[0].tool_use_id must be a text"),
                (
                    "user",
                    [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}],
                    "content[0].content[0].source is of type",
                ),
                ("assistant", [{"type": "tool_use", "name": "f", "input": "{}"}], "content[0].input must be an object"),
                ("assistant", [{"type": "tool_use", "id": "a", "name": "f", "input": {}}], "that needs a text"),
            )
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_anthropics_clients_are_refused(app: App, fields: dict[str, Any], text: str) -> None:
    answer = await app.client.post(MESSAGES, json={**BODIES[MESSAGES], **fields})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error"), answer.text
    assert text in answer.json()["error"]["message"]
    assert not app.player.submits


def test_what_is_nested_beyond_what_can_be_written_is_refused() -> None:
    """A guide's schema is nested 5,000 levels deep. It is refused by an error that names the field."""
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"properties": {"a": deep}}
    with pytest.raises(InvalidRequestError, match="guided_json is nested too deeply"):
        requested_guide(None, None, {"guided_json": deep})


@pytest.mark.parametrize("body", [ChatBody, CompletionBody, DetokenizeBody, ResponseBody, GenerateBody, MessageBody])
def test_every_number_has_a_bound(body: type[BaseModel]) -> None:
    numbers = list(_numbers(body.model_json_schema()))
    assert numbers
    for number in numbers:
        assert number.keys() & {"minimum", "exclusiveMinimum"}, number


def _numbers(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict) and schema.get("type") in ("integer", "number"):
        yield schema
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _numbers(part)
