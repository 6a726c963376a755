"""``/v1/messages`` with Anthropic's client: blocks, events, tools, thoughts, token counts and refusals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import pytest
from pydantic import BaseModel

from kvrelay.common.sampling import FinishReason, GuideKind
from kvrelay.gateway.http.api_keys import line_of
from kvrelay.wire.messages import FailureCode, Submit

from ..chat.test_chat_tools import ARGUMENTS, CALL
from ..http_app import App, app_for, saying, tokens_of
from ..players import Player, Script, good

HELLO: Any = [{"role": "user", "content": "hand over"}]
WEATHER: Any = {
    "name": "weather",
    "description": "Tells the weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
ASKED: Any = {"model": "tiny", "max_tokens": 64, "messages": HELLO}


@asynccontextmanager
async def served(
    directory: Path, script: Script, **settings: Any
) -> AsyncIterator[tuple[App, anthropic.AsyncAnthropic]]:
    async with (
        app_for(directory, script, num_blocks=512, **settings) as app,
        httpx2.AsyncClient(transport=httpx2.ASGITransport(app.asgi, raise_app_exceptions=False)) as http,
        anthropic.AsyncAnthropic(base_url="http://gateway", api_key="x", max_retries=0, http_client=http) as client,
    ):
        yield app, client


def prompt_of(app: App) -> str:
    return app.tokenizer.decode_all(app.player.submits[-1].token_ids)


async def test_text_whole_and_in_events(model_directory: Path) -> None:
    async with served(model_directory, saying("the baton, née", per_message=2)) as (app, client):
        system: Any = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
        whole = await client.messages.create(**ASKED, system=system)
        (block,) = whole.content
        assert block.type == "text"
        assert (block.text, whole.stop_reason, whole.stop_sequence) == ("the baton, née", "end_turn", None)
        assert whole.usage.input_tokens == len(app.player.submits[-1].token_ids)
        assert whole.usage.output_tokens == len(app.tokenizer.encode(block.text, add_special_tokens=False))
        prompt = prompt_of(app)
        assert prompt.index("Be brief.\n\nBe kind.") < prompt.index("hand over")
        events = [event async for event in await client.messages.create(**ASKED, system=system, stream=True)]
        kinds = [event.type for event in events]
        assert kinds[:2] == ["message_start", "content_block_start"]
        assert set(kinds[2:-3]) == {"content_block_delta"}
        assert len(kinds) > 7, "text comes as it is written"
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        async with client.messages.stream(**ASKED, system=system) as stream:
            final = await stream.get_final_message()
        assert (final.content[0].to_dict(), final.stop_reason) == (block.to_dict(), "end_turn")
        assert final.usage.to_dict() == whole.usage.to_dict()


async def test_tools_both_ways(model_directory: Path) -> None:
    async with served(model_directory, saying(f"One moment. {CALL}{CALL}")) as (app, client):
        history: Any = [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Look.", "signature": ""},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "call_7", "name": "weather", "input": {"city": "Bern"}},
                    {"type": "tool_use", "id": "call_8", "name": "weather", "input": {"city": "Biel"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "call_7", "content": [{"type": "text", "text": "snow"}]},
                    {"type": "tool_result", "tool_use_id": "call_8", "content": "no such city", "is_error": True},
                    {"type": "text", "text": "And now?"},
                ],
            },
        ]
        asked: Any = {**ASKED, "messages": history, "tools": [WEATHER]}
        whole = await client.messages.create(**asked)
        assert [block.type for block in whole.content] == ["text", "tool_use", "tool_use"]
        assert whole.stop_reason == "tool_use"
        calls = [block for block in whole.content if block.type == "tool_use"]
        assert [(call.name, call.input) for call in calls] == [("weather", ARGUMENTS)] * 2
        assert len({call.id for call in calls}) == 2
        prompt = prompt_of(app)
        places = [prompt.index(part) for part in ("I look.", "Bern", "Biel", "snow", "Error: no such city", "And now?")]
        assert places == sorted(places)
        assert "Tells the weather" in prompt
        async with client.messages.stream(**asked) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_message()
        assert [(block.name, block.input) for block in final.content if block.type == "tool_use"] == [
            ("weather", ARGUMENTS)
        ] * 2
        assert len([event for event in events if event.type == "input_json"]) > 6, "arguments come as they are written"


@pytest.mark.parametrize(
    ("choice", "is_guided"), [("none", False), ("auto", True), ("any", True), ("tool", True)], ids=lambda value: value
)
async def test_tool_choice(model_directory: Path, choice: str, is_guided: bool) -> None:
    async with served(model_directory, saying(f"{CALL}{CALL}")) as (app, client):
        wanted: Any = {"type": choice, **({"name": "weather"} if choice == "tool" else {})}
        if choice == "any":
            wanted["disable_parallel_tool_use"] = True
        whole = await client.messages.create(**ASKED, tools=[WEATHER], tool_choice=wanted)
        guide = app.player.submits[-1].sampling.guide
        assert (guide is not None) == is_guided
        if guide is not None:
            assert guide.kind is GuideKind.STRUCTURAL_TAG
        num_calls = sum(block.type == "tool_use" for block in whole.content)
        assert num_calls == {"none": 0, "auto": 2, "any": 1, "tool": 1}[choice]


async def test_thoughts_are_blocks_of_their_own(thinking_directory: Path) -> None:
    async with served(thinking_directory, saying("Well.</think>Yes")) as (_, client):
        thought, said = (await client.messages.create(**ASKED)).content
        assert (thought.type, said.type) == ("thinking", "text")
        assert thought.thinking == "Well."
        assert said.text == "Yes"
        async with client.messages.stream(**ASKED) as stream:
            final = await stream.get_final_message()
        assert [block.to_dict() for block in final.content] == [thought.to_dict(), said.to_dict()]


async def test_the_template_hears_how_to_think(thinking_directory: Path) -> None:
    (thinking_directory / "chat_template.jinja").write_text(
        "{{ enable_thinking }} {{ thinking }} {{ thinking_budget }} {{ reasoning_effort }}"
    )
    async with served(thinking_directory, saying("x")) as (app, client):
        enabled: Any = {"type": "enabled", "budget_tokens": 1024}
        await client.messages.create(**ASKED, thinking=enabled, output_config={"effort": "low"})
        assert prompt_of(app) == "True True 1024 low"
        await client.messages.create(**ASKED, thinking={"type": "disabled"})
        assert prompt_of(app).split() == ["False", "False"]


async def test_why_an_answer_ends(model_directory: Path) -> None:
    async with served(model_directory, saying("the bat", end=FinishReason.LENGTH)) as (app, client):
        assert (await client.messages.create(**ASKED)).stop_reason == "max_tokens"
        more: Any = {**ASKED, "max_tokens": 10_000}  # more than the model has room for
        assert (await client.messages.create(**more)).stop_reason == "model_context_window_exceeded"
        submit = app.player.submits[-1]
        assert len(submit.token_ids) + submit.sampling.max_tokens == 2048
    async with served(model_directory, saying("the END more")) as (_, client):
        stopped = await client.messages.create(**ASKED, stop_sequences=["END", "ZZ"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "END")
        (block,) = stopped.content
        assert block.type == "text"
        assert block.text == "the "
    async with served(model_directory, saying(CALL[:-30], end=FinishReason.LENGTH)) as (_, client):
        cut = await client.messages.create(**ASKED, tools=[WEATHER])
        assert cut.stop_reason == "max_tokens"
        assert [block.input for block in cut.content if block.type == "tool_use"] == [{}]


@pytest.mark.parametrize("value", ["1e999", '"\\ud83d"'])
async def test_arguments_that_no_json_can_tell_are_left_out(model_directory: Path, value: str) -> None:
    """An infinite number, and half of a character."""
    call = f'<tool_call>\n{{"name": "weather", "arguments": {{"city": {value}}}}}\n</tool_call>'
    async with served(model_directory, saying(call)) as (_, client):
        whole = await client.messages.create(**ASKED, tools=[WEATHER])
        assert whole.stop_reason == "tool_use"
        assert [block.input for block in whole.content if block.type == "tool_use"] == [{}]


async def test_an_answer_that_is_begun_goes_on(model_directory: Path) -> None:
    async with served(model_directory, saying(" and done")) as (app, client):
        begun: Any = {**ASKED, "messages": [*HELLO, {"role": "assistant", "content": "Begun"}]}
        (block,) = (await client.messages.create(**begun)).content
        assert block.type == "text"
        assert block.text == " and done"
        assert prompt_of(app).endswith("Begun")
        await client.messages.create(**begun, tool_choice={"type": "auto"})  # of no tools: nothing to choose
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[1\] is the assistant's"):
            await client.messages.create(**begun, tools=[WEATHER])


async def test_what_the_text_must_match(model_directory: Path) -> None:
    class City(BaseModel):
        name: str

    async with served(model_directory, saying('{"name": "Bern"}')) as (app, client):
        parsed = await client.messages.parse(**ASKED, output_format=City)
        assert parsed.parsed_output == City(name="Bern")
        guide = app.player.submits[-1].sampling.guide
        assert guide is not None
        assert guide.kind is GuideKind.JSON_SCHEMA


async def test_counting_needs_no_worker(model_directory: Path) -> None:
    async with served(model_directory, good) as (app, client):
        asked: Any = {"model": "tiny", "messages": HELLO, "tools": [WEATHER], "system": "Be brief."}
        await client.messages.create(**asked, max_tokens=5)
        count = await client.messages.count_tokens(**asked)
        assert count.input_tokens == len(app.player.submits[-1].token_ids)
        await app.player.server.stop()
        assert (await client.messages.count_tokens(**asked)).input_tokens == count.input_tokens


async def test_errors_have_its_shape(model_directory: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(line_of("one", "x") + "\n")
    async with served(model_directory, good, api_keys=str(keys)) as (app, client):
        await client.messages.create(**ASKED)  # its key comes as x-api-key
        other = client.with_options(api_key="y")
        for asked, kind, status in (
            (other.messages.create(**ASKED), "authentication_error", 401),
            (client.messages.create(**{**ASKED, "model": "huge"}), "not_found_error", 404),
            (client.messages.create(**{**ASKED, "max_tokens": 0}), "invalid_request_error", 400),
            (client.messages.count_tokens(model="huge", messages=HELLO), "not_found_error", 404),
        ):
            with pytest.raises(anthropic.APIStatusError) as raised:
                await asked
            assert raised.value.status_code == status
            body: Any = raised.value.body
            assert (body["type"], body["error"]["type"]) == ("error", kind)
            assert body["request_id"]
        assert (await app.client.get("/v1/messages", headers={"x-api-key": "x"})).json()["type"] == "error"


@pytest.mark.parametrize("block", ["text", "tool_result", None, 5, []])
async def test_a_block_that_is_no_object_is_refused(model_directory: Path, block: Any) -> None:
    async with served(model_directory, good) as (app, _):
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            refusal = await app.post(path, 400, max_tokens=5, messages=[{"role": "user", "content": [block]}])
            assert "messages[0].content[0] must be a block" in refusal["error"]["message"]


async def test_a_stream_that_fails_says_so(model_directory: Path) -> None:
    def script(player: Player, submit: Submit) -> None:
        if submit.attempt == 1:
            player.tokens(submit, 0, tokens_of(player.tokenizer, "the"))
        player.fail(submit, FailureCode.DEADLINE)

    async with served(model_directory, script) as (_, client):
        with pytest.raises(anthropic.APIStatusError) as raised:
            async for _event in await client.messages.create(**ASKED, stream=True):
                pass
        body: Any = raised.value.body
        assert body["error"]["type"] == "timeout_error"
