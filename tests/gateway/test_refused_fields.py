"""What a field's own range does not say: what contradicts itself or the model, and what is not served, is refused by name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from .http_app import CHAT, TEXT, app_for
from .players import good

RESPONSES = "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
    TEXT: {"prompt": "x"},
    RESPONSES: {"input": "x"},
}
BEAMS = {"use_beam_search": True}
TOOLS = [{"type": "function", "function": {"name": "weather"}}]
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}

# Fields that a body of the path has beside the others, the one that is named, and what is said of it.
Case = tuple[dict[str, Any], str, str]
OF_TEXTS: list[Case] = [
    ({"n": 3, "best_of": 2}, "best_of", "less than n"),
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
    ({"prompt": [-1] * 1_000_000}, "prompt", "greater than or equal to 0"),
    ({"logits_processors": ["loud"]}, "logits_processors", "there are none"),
    ({"guided_regex": "a", "structured_outputs": {"json": {}}}, "structured_outputs", "together"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "together"),
    ({"structured_outputs": {"yaml": {}}}, "structured_outputs", "has no 'yaml'"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema must be an object"),
    ({"response_format": {"type": "xml"}}, "response_format", "it must be text"),
    ({"guided_choice": []}, "guided_choice", "1 to 1024 strings"),
    ({"guided_json": "{"}, "guided_json", "not JSON"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream is not true"),
    ({"service_tier": "gold"}, "service_tier", "'auto', 'default', 'flex', 'priority' or 'scale'"),
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
    ({"messages": [{"content": "x"}]}, "messages[0]", "messages[0].role is 'None'"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content", "a text or a list of text parts, not '7'"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content", "reads text only: no images"),
    ({"reasoning_effort": "hugest"}, "reasoning_effort", "'low', 'medium', 'high'"),
]
OF_RESPONSES: list[Case] = [
    ({"input": [{"type": "web_search_call"}]}, "input[0]", "function_call_output"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content", "text part"),
    ({"input": [{"type": "function_call", "name": "x"}]}, "input[0]", "arguments"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "whole conversation"),
    ({"background": True}, "background", "not supported"),
    ({"text": {"format": {"type": "json_schema"}}}, "text", "no schema"),
    ({"max_output_tokens": 9999}, "max_output_tokens", "512"),
    ({"tool_choice": "required"}, "tool_choice", "tool_choice"),
]


@pytest.mark.parametrize(("path", "cases"), [(TEXT, OF_TEXTS), (CHAT, OF_CHATS), (RESPONSES, OF_RESPONSES)])
async def test_what_cannot_be_served_is_refused_by_name(model_directory: Path, path: str, cases: list[Case]) -> None:
    async with app_for(model_directory, good, max_body_bytes=8_000_000) as app:
        for fields, param, text in cases:
            async with asyncio.timeout(5):
                error = (await app.post(path, 400, **{**BODIES[path], **fields}))["error"]
            assert (error["param"], error["type"]) == (param, "invalid_request_error"), error
            assert text in error["message"]
            assert len(error["message"]) < 400
        assert not app.player.submits
