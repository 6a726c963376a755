"""Text to tokens and back, in TGI's form and in vLLM's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..http_app import App, app_for
from ..players import good

TEXT = "one relay, née 🏃 <eos>"
JSON = {"content-type": "application/json"}
MESSAGES = [{"role": "user", "content": "hand over"}]


async def test_tgis_form_tells_where_tokens_stand(app: App) -> None:
    tokens = await app.post("/tokenize", inputs=TEXT)
    assert [token["id"] for token in tokens] == app.tokenizer.encode(TEXT, add_special_tokens=True)
    assert all(TEXT[token["start"] : token["stop"]] == token["text"] for token in tokens)
    assert tokens[-1] == {
        "id": app.tokenizer.eos_ids[0],
        "text": "<eos>",
        "start": len(TEXT) - 5,
        "stop": len(TEXT),
    }
    assert await app.post("/tokenize", inputs="") == []
    half = await app.client.post("/tokenize", content=b'{"inputs": "\\ud800"}', headers=JSON)
    assert (half.status_code, half.json()["error_type"]) == (422, "validation")


async def test_a_long_text_is_written_in_parts(app: App) -> None:
    text = "née " * 3000
    tokens = await app.post("/tokenize", inputs=text)
    assert len(tokens) > 6000
    assert [token["id"] for token in tokens] == app.tokenizer.encode(text, add_special_tokens=True)
    ids = [token["id"] for token in tokens]
    assert await app.post("/detokenize", tokens=ids) == {"prompt": text}


async def test_vllms_forms(app: App) -> None:
    ids = app.tokenizer.encode(TEXT, add_special_tokens=True)
    limit = app.player.card.max_model_len
    answer = await app.post("/tokenize", prompt=TEXT, model="tiny")
    assert answer == {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": None}
    named = await app.post("/tokenize", prompt=" one relay", return_token_strs=True)
    assert "".join(named["token_strs"]) == "ĠoneĠrelay"
    chat = await app.post("/tokenize", messages=MESSAGES)
    assert app.tokenizer.decode_all(chat["tokens"]) == "<user>hand over\n"
    assert await app.post("/detokenize", model="tiny", tokens=ids) == {"prompt": TEXT}
    assert await app.post("/detokenize", tokens=[]) == {"prompt": ""}


async def test_tgis_chats(app: App) -> None:
    answer = await app.post("/chat_tokenize", model="whatever", messages=MESSAGES)
    text = answer["templated_text"]
    assert text == "<user>hand over\n"
    tokens = answer["tokenize_response"]
    assert "".join(token["text"] for token in tokens) == text
    assert [token["id"] for token in tokens] == app.tokenizer.encode(text, add_special_tokens=False)


async def test_a_model_without_a_template(model_directory: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model_directory / name).read_bytes())
    async with app_for(tmp_path, good) as app:
        refused = await app.post("/chat_tokenize", 422, messages=MESSAGES)
        assert refused["error_type"] == "template_error"
        assert refused["error"].startswith("Template error: the model has no chat template")
        vllm = await app.post("/tokenize", 400, messages=MESSAGES)
        assert vllm["error"]["type"] == "invalid_request_error"


async def test_who_is_refused_how(app: App) -> None:
    """A body without a clear form gets TGI's 422. Bodies of vLLM's form get OpenAI's errors."""
    bodies: list[dict[str, Any]] = [{}, {"prompt": "x", "inputs": "y"}, {"prompt": "x", "messages": MESSAGES}]
    for body in bodies:
        assert "exactly one of inputs, prompt and messages" in (await app.post("/tokenize", 422, **body))["error"]
    assert (await app.post("/tokenize", 404, prompt="x", model="other"))["error"]["code"] == "model_not_found"
    refused = await app.post("/detokenize", 400, tokens=[5, 300])
    assert "token id 300; this model's ids are 0 to 299" in refused["error"]["message"]
    assert (await app.post("/detokenize", 400, tokens=[-1]))["error"]["param"] == "tokens"


async def test_no_worker_is_needed(app: App) -> None:
    await app.lose_worker()
    answer = await app.post("/tokenize", prompt="x")
    assert answer["count"] == 1
    assert (await app.post("/detokenize", tokens=answer["tokens"])) == {"prompt": "x"}
    assert len(await app.post("/tokenize", inputs="x")) == 1
