"""Tools and thoughts over HTTP: what the gateway sends to the model, and how it reads the model's text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai

from ..http_app import CHAT, app_for, saying

USER = [{"role": "user", "content": "hand over"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Z\\u00fcrich, \\"old\\" town"}}\n</tool_call>'
ARGUMENTS = {"city": 'Zürich, "old" town'}


async def test_a_call_streamed_and_whole(model_directory: Path) -> None:
    async with (
        app_for(model_directory, saying(f"One moment. {CALL}{CALL}")) as app,
        openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="x", max_retries=0, http_client=app.client) as client,
    ):
        request: Any = {"model": "tiny", "messages": USER, "tools": [WEATHER]}
        whole = (await client.chat.completions.create(**request)).choices[0]
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content is not None
        assert whole.message.content.strip() == "One moment."
        assert whole.message.tool_calls is not None
        assert len({call.id for call in whole.message.tool_calls}) == 2
        for call in whole.message.tool_calls:
            assert call.type == "function"
            assert (call.function.name, json.loads(call.function.arguments)) == ("weather", ARGUMENTS)
        calls: dict[int, list[str]] = {}
        content, reasons = "", []
        async for chunk in await client.chat.completions.create(**request, stream=True):
            delta = chunk.choices[0].delta
            content += delta.content or ""
            reasons.append(chunk.choices[0].finish_reason)
            for part in delta.tool_calls or []:
                assert part.function is not None
                pieces = calls.setdefault(part.index, [])
                if part.function.name:
                    assert not pieces, "the name comes once, and first"
                    assert part.id
                    pieces.append(part.function.name)
                pieces.append(part.function.arguments or "")
        assert content.strip() == "One moment."
        assert reasons[-1] == "tool_calls"
        assert [pieces[0] for pieces in calls.values()] == ["weather"] * 2
        assert [json.loads("".join(pieces[1:])) for pieces in calls.values()] == [ARGUMENTS] * 2
        assert all(len(pieces) > 4 for pieces in calls.values()), "arguments come as they are written"


async def test_json_whose_text_spells_a_call_is_no_call(model_directory: Path) -> None:
    """With a response format an answer is calls or JSON. What stands in a string of JSON is text."""
    call = "<tool_call>weather<arg_key>city</arg_key><arg_value>Bern</arg_value></tool_call>"
    json_format: Any = {"response_format": {"type": "json_object"}}
    async with app_for(model_directory, saying(text := f'{{"quote": "as in {call}"}}'), tool_parser="glm47") as app:
        (choice,) = (await app.post(CHAT, messages=USER, tools=[WEATHER], **json_format))["choices"]
        assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
        (choice,) = (await app.post(CHAT, messages=USER, tools=[WEATHER]))["choices"]
        assert choice["message"]["tool_calls"], "in free text it is one"
    async with app_for(model_directory, saying(call), tool_parser="glm47") as app:
        (choice,) = (await app.post(CHAT, messages=USER, tools=[WEATHER], **json_format))["choices"]
        assert choice["message"]["tool_calls"], "so it is in place of JSON"


async def test_the_model_is_told_of_its_tools_and_of_what_came_of_them(model_directory: Path) -> None:
    async with app_for(model_directory, saying("fine"), num_blocks=512) as app:
        call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
        messages = [
            *USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "snow"},
        ]
        answer = await app.post(CHAT, messages=messages, tools=[WEATHER], max_tokens=5)
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": "fine", "refusal": None}
        assert answer["choices"][0]["finish_reason"] == "stop"
        prompt = app.tokenizer.decode_all(app.player.submits[-1].token_ids)
        for part in ("weather", "Tells the weather", "Bern", "snow"):
            assert part in prompt


async def test_thoughts_are_apart(thinking_directory: Path) -> None:
    """The chat template opens the thoughts, and the answer ends them. They are separate from the content."""
    async with app_for(thinking_directory, saying("Well, a < b.</think>\n\nThus: yes")) as app:
        message = (await app.post(CHAT, messages=USER))["choices"][0]["message"]
        assert message["reasoning_content"].strip() == "Well, a < b."
        assert message["content"].strip() == "Thus: yes"
        content, thoughts = "", ""
        for event in await app.events(CHAT, messages=USER):
            delta = event["choices"][0]["delta"]
            assert not (content and delta.get("reasoning_content")), "thoughts come first"
            content += delta.get("content", "")
            thoughts += delta.get("reasoning_content", "")
        assert (thoughts.strip(), content.strip()) == ("Well, a < b.", "Thus: yes")


async def test_an_answer_that_is_begun_goes_on(model_directory: Path) -> None:
    async with app_for(model_directory, saying(" and done")) as app:
        messages = [*USER, {"role": "assistant", "content": "Begun"}]
        fields = {"messages": messages, "continue_final_message": True}
        assert (await app.post(CHAT, **fields))["choices"][0]["message"]["content"] == " and done"
        prompt = app.tokenizer.decode_all(app.player.submits[-1].token_ids)
        assert prompt.endswith("Begun")
        echoed = (await app.post(CHAT, **fields, echo=True))["choices"][0]["message"]["content"]
        assert echoed == "Begun and done"
        streamed = await app.events(CHAT, **fields, echo=True)
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in streamed) == "Begun and done"
