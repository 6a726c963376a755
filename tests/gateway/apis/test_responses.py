"""``/v1/responses`` with OpenAI's client: items, events, calls, formats and refusals."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai

from kvrelay.common.sampling import FinishReason, GuideKind
from kvrelay.gateway.apis.responses.answer import ResponseItems
from kvrelay.gateway.chat.tools.calls import ParsedDelta, Said, Thought, ToolCallDelta
from kvrelay.wire.messages import FailureCode, Submit

from ..chat.test_chat_tools import ARGUMENTS, CALL
from ..http_app import App, app_for, saying, tokens_of
from ..players import Player, Script

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}


@asynccontextmanager
async def served(directory: Path, script: Script) -> AsyncIterator[tuple[App, openai.AsyncOpenAI]]:
    async with (
        app_for(directory, script, num_blocks=512) as app,
        openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="x", max_retries=0, http_client=app.client) as client,
    ):
        yield app, client


async def test_text(model_directory: Path) -> None:
    async with served(model_directory, saying("the baton, née")) as (app, client):
        response = await client.responses.create(model="tiny", input="hand over", instructions="Be brief.")
        assert (response.output_text, response.status) == ("the baton, née", "completed")
        assert response.usage is not None
        assert response.usage.output_tokens == len(app.tokenizer.encode("the baton, née", add_special_tokens=False))
        assert response.usage.input_tokens_details.cached_tokens == 0
        assert response.usage.input_tokens_details.cache_write_tokens == 0
        prompt = app.tokenizer.decode_all(app.player.submits[-1].token_ids)
        assert prompt.index("Be brief.") < prompt.index("hand over")


async def test_events_tell_the_same_as_the_whole(model_directory: Path) -> None:
    async with served(model_directory, saying("the baton, née")) as (_, client):
        events = [event async for event in await client.responses.create(model="tiny", input="x", stream=True)]
        kinds = [event.type for event in events]
        assert kinds[:4] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ]
        assert set(kinds[4:-4]) == {"response.output_text.delta"}
        assert kinds[-4:] == [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == "the baton, née"
        last = events[-1]
        assert last.type == "response.completed"
        assert last.response.output_text == "the baton, née"
        async with client.responses.stream(model="tiny", input="x") as stream:
            final = await stream.get_final_response()
        assert final.output_text == "the baton, née"


async def test_calls_both_ways(model_directory: Path) -> None:
    async with served(model_directory, saying(f"One moment. {CALL}")) as (app, client):
        history: Any = [
            {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"type": "function_call", "call_id": "call_7", "name": "weather", "arguments": '{"city": "Bern"}'},
            {"type": "function_call_output", "call_id": "call_7", "output": "snow"},
        ]
        response = await client.responses.create(model="tiny", input=history, tools=[WEATHER])
        message, call = response.output
        assert (message.type, call.type) == ("message", "function_call")
        assert call.name == "weather"
        assert json.loads(call.arguments) == ARGUMENTS
        prompt = app.tokenizer.decode_all(app.player.submits[-1].token_ids)
        assert "Bern" in prompt
        assert "snow" in prompt
        events = [
            event
            async for event in await client.responses.create(model="tiny", input="x", tools=[WEATHER], stream=True)
        ]
        pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert json.loads("".join(pieces)) == ARGUMENTS
        assert len(pieces) > 3
        last = events[-1]
        assert last.type == "response.completed"
        assert [item.type for item in last.response.output] == ["message", "function_call"]
        choice: Any = {"type": "function", "name": "weather"}
        await client.responses.create(model="tiny", input="x", tools=[WEATHER], tool_choice=choice)
        guide = app.player.submits[-1].sampling.guide
        assert guide is not None
        assert guide.kind is GuideKind.STRUCTURAL_TAG


async def test_thoughts_that_come_back_are_of_the_message_or_the_calls_behind_them(thinking_directory: Path) -> None:
    template = "{% for m in messages %}{{ m['role'] }}({{ m['reasoning_content'] }}){{ m['content'] }}\n{% endfor %}"
    (thinking_directory / "chat_template.jinja").write_text(template)
    history: Any = [
        {"role": "user", "content": "Weather?"},
        _thought("I look.", "Look."),
        {"type": "function_call", "call_id": "call_7", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_7", "output": "snow"},
        {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "It snows."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Snow."}]},
        _thought("Nothing follows."),
        {"role": "user", "content": "And now?"},
        _thought("Nothing either."),
    ]
    async with served(thinking_directory, saying("x")) as (app, client):
        await client.responses.create(model="tiny", input=history)
        told = app.tokenizer.decode_all(app.player.submits[-1].token_ids)
        assert "assistant(I look.Look.)<tool_call>" in told
        assert "assistant(It snows.)Snow.\nuser()And now?\n" in told
        assert "Nothing" not in told
        for wrong in (5, "x", ["x"], [{"type": "reasoning_text"}]):
            refused = await app.post("/v1/responses", 400, input=[{"type": "reasoning", "content": wrong}])
            assert refused["error"]["param"] == "input[0].content"


def _thought(*texts: str) -> dict[str, Any]:
    parts = [{"type": "reasoning_text", "text": text} for text in texts]
    summary = [{"type": "summary_text", "text": "In short."}]
    return {"type": "reasoning", "id": "rs_1", "summary": summary, "content": parts}


async def test_thoughts_are_an_item_of_their_own(thinking_directory: Path) -> None:
    async with served(thinking_directory, saying("Well.</think>Yes")) as (_, client):
        response = await client.responses.create(model="tiny", input="x")
        thought, said = response.output
        assert (thought.type, said.type) == ("reasoning", "message")
        assert thought.content is not None
        assert thought.content[0].text == "Well."
        assert response.output_text == "Yes"
        events = [event async for event in await client.responses.create(model="tiny", input="x", stream=True)]
        told = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
        assert told == "Well."


async def test_what_is_cut_off_is_incomplete(model_directory: Path) -> None:
    script = saying("the bat", end=FinishReason.LENGTH)
    async with served(model_directory, script) as (_, client):
        response = await client.responses.create(model="tiny", input="x", max_output_tokens=16)
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        events = [event async for event in await client.responses.create(model="tiny", input="x", stream=True)]
        assert events[-1].type == "response.incomplete"


async def test_a_stream_that_fails_says_so(model_directory: Path) -> None:
    def script(player: Player, submit: Submit) -> None:
        if submit.attempt == 1:
            player.tokens(submit, 0, tokens_of(player.tokenizer, "the"))
        player.fail(submit, FailureCode.DEADLINE)

    async with served(model_directory, script) as (_, client):
        events = [event async for event in await client.responses.create(model="tiny", input="x", stream=True)]
        last = events[-1]
        assert last.type == "response.failed"
        assert last.response.error is not None
        assert "timeout" in last.response.error.message


async def test_formats_and_log_probabilities(model_directory: Path) -> None:
    """Also of white space and of parts of characters, whose text is held back at first."""
    said = "\n née 🏃"
    async with served(model_directory, saying(said)) as (app, client):
        schema: Any = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
        await client.responses.create(model="tiny", input="x", text={"format": schema})
        guide = app.player.submits[-1].sampling.guide
        assert guide is not None
        assert (guide.kind, json.loads(guide.text)) == (GuideKind.JSON_SCHEMA, {"type": "object"})
        response = await client.responses.create(
            model="tiny", input="x", include=["message.output_text.logprobs"], top_logprobs=2
        )
        assert app.player.submits[-1].sampling.num_logprobs == 2
        (message,) = response.output
        assert message.type == "message"
        (part,) = message.content
        assert part.type == "output_text"
        assert part.logprobs is not None
        assert b"".join(bytes(entry.bytes) for entry in part.logprobs) == said.encode()


def test_items_follow_one_another_and_are_told_in_order() -> None:
    """One delta may hold the end of a call, another call and text. Items and events stay in order."""
    ids = iter("abcdefg")
    items = ResponseItems(lambda: next(ids))
    for parts in (
        (Thought("hm"),),
        (Said("so"),),
        (ToolCallDelta(0, "call_0", "f", "{"),),
        (
            ToolCallDelta(0, arguments="}"),
            ToolCallDelta(1, "call_1", "g", "{"),
            ToolCallDelta(1, arguments="}"),
            Said("e"),
        ),
        (Said("nd"),),
    ):
        items.push(ParsedDelta(parts), [])
    items.close("incomplete")
    events = items.take()
    bodies = list(items.done)
    assert [body["type"] for body in bodies] == ["reasoning", "message", "function_call", "function_call", "message"]
    assert [body["id"] for body in bodies] == ["rs_a", "msg_b", "fc_c", "fc_d", "msg_e"]
    assert [body["status"] for body in bodies] == ["completed"] * 4 + ["incomplete"]
    assert [body["arguments"] for body in bodies[2:4]] == ["{}", "{}"]
    assert bodies[-1]["content"][0]["text"] == "end"
    told = [json.loads(line[6:]) for line in events.decode().splitlines() if line.startswith("data: ")]
    done = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    assert done == bodies
    assert [event["output_index"] for event in told] == sorted(event["output_index"] for event in told)
