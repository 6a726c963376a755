"""A worker refuses a guide. In every API the error names the field in which the client gave the guide."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from kvrelay.wire.messages import FailureCode, Submit
from kvrelay.worker.submit import guide_failed

from ..http_app import CHAT, TEXT, app_for
from ..players import Player, failing, good

USER = [{"role": "user", "content": "hand over"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
STRICT = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def refusing(player: Player, submit: Submit) -> None:
    """A worker that refuses every guide."""
    assert submit.sampling.guide is not None
    player.say(guide_failed((submit.request_id, submit.attempt), "too odd"))


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {"response_format": FORMAT}, "response_format"),
        (TEXT, {"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        (TEXT, {"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json"),
        (TEXT, {"guided_grammar": "root ::= x"}, "guided_grammar"),
        (CHAT, {"response_format": FORMAT}, "response_format"),
        (CHAT, {"tools": TOOLS, "tool_choice": "required"}, "tools"),
        (CHAT, {"tools": STRICT}, "tools"),
        (CHAT, {"tools": TOOLS, "response_format": FORMAT}, "response_format"),
        (CHAT, {"tools": STRICT, "response_format": FORMAT}, None),
        (CHAT, {"tools": STRICT, "tool_choice": "none", "guided_regex": "("}, "guided_regex"),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}, "text.format"),
    ],
)
async def test_the_field_is_named(model_directory: Path, path: str, body: dict[str, Any], param: str | None) -> None:
    given = {TEXT: {"prompt": "x"}, CHAT: {"messages": USER}}.get(path, {"input": "x"})
    async with app_for(model_directory, refusing) as app:
        error = (await app.post(path, 400, **given, **body))["error"]
        assert (error["param"], error["type"], error["code"]) == (param, "invalid_request_error", "invalid_value")
        assert error["message"] == f"{param or 'the guide'} cannot be followed: too odd"
        assert len(app.player.submits) == 1, "no other worker would do"


async def test_a_clients_mistake_is_no_warning(model_directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with app_for(model_directory, refusing) as app:
        await app.post(TEXT, 400, prompt="x", guided_regex="(")
    ours = [record for record in caplog.records if record.name.startswith("kvrelay.gateway")]
    assert not [record for record in ours if record.levelno >= logging.WARNING]


async def test_tgis_routes_name_it_in_their_text(model_directory: Path) -> None:
    async with app_for(model_directory, refusing) as app:
        body: dict[str, Any] = {"inputs": "x", "parameters": {"grammar": {"type": "regex", "value": "("}}}
        for path in ("/generate", "/generate_stream", "/"):
            told = await app.post(path, 422, **body)
            assert told.pop("request_id")
            assert told == {
                "error": "Input validation error: parameters.grammar cannot be followed: too odd",
                "error_type": "validation",
            }


async def test_a_worker_that_does_not_say_what_it_is_about_leaves_the_field_open(model_directory: Path) -> None:
    async with app_for(model_directory, failing(FailureCode.INVALID)) as app:
        error = (await app.post(TEXT, 400, prompt="x", guided_regex="("))["error"]
        assert (error["param"], error["message"]) == (None, "scripted")


async def test_a_guide_that_is_too_large_never_leaves_the_gateway(model_directory: Path) -> None:
    async with app_for(model_directory, good) as app:
        error = (await app.post(TEXT, 400, prompt="x", structured_outputs={"regex": "a" * 2**16 + "b"}))["error"]
        assert error["param"] == "structured_outputs.regex"
        assert "the guide has 65537 bytes; it must have at most 65536" in error["message"]
        assert app.player.submits == []
