"""Errors of TGI's routes: status, type and text, also of errors at the gateway's edge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvrelay.gateway.errors import (
    ApiError,
    AttemptsFailedError,
    BodyTooLargeError,
    ChatTemplateError,
    ContextLengthError,
    ImageHostError,
    InvalidRequestError,
    OverloadedError,
    RequestTimeoutError,
    UnauthorizedError,
    UnavailableError,
    tgi_error,
)
from kvrelay.gateway.http.edge import TGI_PATHS
from kvrelay.wire.messages import FailureCode

from ..http.test_api_keys import keys_file
from ..http_app import CHAT, App, app_for
from ..players import failing, good


@pytest.mark.parametrize(
    ("error", "status", "kind", "text"),
    [
        (InvalidRequestError("x: wrong"), 422, "validation", "Input validation error: x: wrong"),
        (ContextLengthError("long"), 422, "validation", "Input validation error: long"),
        (ChatTemplateError("none"), 422, "template_error", "Template error: none"),
        (OverloadedError("full"), 429, "overloaded", "Model is overloaded: full"),
        (AttemptsFailedError("3"), 424, "generation", "Request failed during generation: 3"),
        (ImageHostError("down"), 424, "generation", "Request failed before generation: down"),
        (UnavailableError("no worker"), 503, "unhealthy", "no worker"),
        (RequestTimeoutError("late"), 504, "timeout", "late"),
        (UnauthorizedError("no key"), 401, "unauthorized", "no key"),
        (BodyTooLargeError("big"), 413, "validation", "big"),
        (ApiError("bug"), 500, "incomplete_generation", "Incomplete generation: bug"),
    ],
)
def test_each_error_has_its_kind(error: ApiError, status: int, kind: str, text: str) -> None:
    assert tgi_error(error) == (status, {"error": text, "error_type": kind})


ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {}),
    ("/generate_stream", {}),
    ("/", {}),
    ("/", {"stream": True}),
]
WRONG: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"temperature": 0}, ("parameters.temperature", "greater than 0, not 0")),
    ({"max_new_tokens": 600}, ("max_new_tokens is 600", "512 tokens", "lower max_new_tokens to")),
    ({"stop": ["x"] * 17}, ("parameters.stop", "16")),
    ({"stop": "x"}, ("parameters.stop", "array", "'x'")),
    ({"stop": ["x" * 1025]}, ("parameters.stop", "1024")),
    ({"adapter_id": "lora"}, ("adapter_id='lora'", "not served")),
    ({"grammar": {"type": "ebnf", "value": "x"}}, ("parameters.grammar.type",)),
    ({"grammar": {"type": "regex", "value": 5}}, ("grammar.value", "a string")),
    ({"grammar": {"type": "json", "value": "{"}}, ("grammar.value is not JSON",)),
    ({"details": "yes"}, ("parameters.details",)),
    *(
        ({name: value}, (f"parameters.{name}",))
        for name, values in {
            "best_of": (0, 129),
            "temperature": (100.1, "1", [1]),
            "repetition_penalty": (0, 10.1),
            "frequency_penalty": (-2.01, 2.01),
            "top_k": (0, 2**31, 1.5),
            "top_p": (0, 1),
            "typical_p": (0, 1),
            "max_new_tokens": (0,),
            "truncate": (0,),
            "seed": (-1, 2**64),
            "top_n_tokens": (-1, 21),
        }.items()
        for value in values
    ),
]
WRONG_IN_PART: list[tuple[list[tuple[str, dict[str, Any]]], dict[str, Any], tuple[str, ...]]] = [
    (ROUTES[::2], {"best_of": 2}, ("best_of is 2, and without sampling all would be the same: set do_sample",)),
    (ROUTES[::2], {"best_of": 2, "top_k": 9, "seed": 4}, ("seed must not be set when best_of > 1",)),
    (ROUTES[1::2], {"best_of": 2, "do_sample": True}, ("best_of is 2", "stream")),
    (ROUTES[1::2], {"decoder_input_details": True}, ("decoder_input_details", "stream")),
]


async def test_what_is_wrong_is_named(app: App) -> None:
    for routes, parameters, names in [*((ROUTES, *case) for case in WRONG), *WRONG_IN_PART]:
        for path, more in routes:
            refused = await app.post(path, 422, inputs="x", parameters=parameters, **more)
            assert refused["error_type"] == "validation"
            assert refused["error"].startswith("Input validation error: ")
            for name in names:
                assert name in refused["error"]
    assert app.player.submits == []


async def test_a_bad_body_is_422_in_tgis_shape(app: App) -> None:
    for content in (b"{", b"[]", b"{}", b'{"inputs": ""}', b'{"inputs": 5}', b'{"inputs": "x", "parameters": 1}'):
        response = await app.client.post("/generate", content=content, headers={"content-type": "application/json"})
        assert (response.status_code, response.json()["error_type"]) == (422, "validation"), content
    assert (await app.client.post("/generate", content=b"x")).status_code == 422
    # On OpenAI's routes the same error is OpenAI's 400.
    assert (await app.client.post(CHAT, json={}, headers={})).status_code == 400


async def test_a_method_that_a_path_does_not_take(app: App) -> None:
    response = await app.client.get("/generate")
    assert response.status_code == 405
    named = {"request_id": response.headers["x-request-id"]}
    assert response.json() == {
        "error": "'/generate' does not take 'GET'; send POST", "error_type": "validation", **named
    }  # fmt: skip
    unknown = await app.client.get("/nowhere")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")


async def test_no_room_is_overloaded_with_a_hint(model_directory: Path) -> None:
    script = failing(FailureCode.NO_ROOM)
    async with app_for(model_directory, script, relay={"room_timeout_s": 0.05}) as app:
        response = await app.client.post("/generate", json={"inputs": "x"})
        assert response.status_code == 429
        assert response.json()["error_type"] == "overloaded"
        assert response.json()["error"].startswith("Model is overloaded: ")
        assert int(response.headers["retry-after"]) >= 1


async def test_everything_but_health_needs_a_key(tmp_path: Path, model_directory: Path) -> None:
    async with app_for(model_directory, good, api_keys=str(keys_file(tmp_path, "alice"))) as app:
        key = {"authorization": "Bearer key-of-alice"}
        for path in sorted(TGI_PATHS):
            for method in ("GET", "POST"):
                response = await app.client.request(method, path, json={"inputs": "x"})
                if path in ("/health", "/ping"):
                    assert response.status_code in (200, 405)
                    continue
                assert response.status_code == 401, path
                assert response.json()["error_type"] == "unauthorized"
                assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/openapi.json", "/docs", "/metrics", "/health/live", "/health/ready"):
            assert (await app.client.get(path)).status_code == 200
        assert (await app.client.post("/detokenize", json={"tokens": [5]})).json()["error"]["code"] == "invalid_api_key"
        assert (await app.client.get("/health/")).status_code == 401
        assert app.player.submits == []
        assert (await app.client.post("/generate", json={"inputs": "x"}, headers=key)).status_code == 200
        assert (await app.client.get("/info", headers=key)).status_code == 200
