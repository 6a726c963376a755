"""Ten different types of model through `kvrelay local`: tiny random weights and a tokenizer, real processes and
HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import tokenizers.models
import tokenizers.pre_tokenizers

from kvrelay.launcher.client import counter_values
from kvrelay.launcher.local.deployment import LocalDeployment
from kvrelay.launcher.settings import LocalSettings
from tests.models.tiny import VOCAB, generate, tiny_model

from .conftest import wait_until_idle

TYPES = "gemma2 gemma3 gpt_oss mixtral qwen3_moe deepseek_v3 phi3 cohere2 gpt2 qwen3_next"
MARKS = {"deepseek_v3": pytest.mark.fast}  # the type least like the demo model
PROMPT = [3 + 7 * index % 190 for index in range(41)]
NUM_TOKENS = 12


def save(model_type: str, directory: Path, **changes: Any) -> tuple[Any, tokenizers.Tokenizer]:
    """Save a model's directory as users have it, and return model and tokenizer. Each word is one token."""
    model = tiny_model(model_type, **changes)
    model.save_pretrained(directory)
    words = {f"w{index}": index for index in range(VOCAB)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return model, tokenizer


def streamed(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of all events of a stream."""
    choices: list[dict[str, Any]] = []
    body = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True, **body}
    with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                choices += event["choices"]
    return choices


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # transformers warns of fields that tiny configurations lack
@pytest.mark.parametrize("model_type", [pytest.param(one, marks=MARKS.get(one, ())) for one in TYPES.split()])
def test_a_type_is_served(model_type: str, tmp_path: Path) -> None:
    """A completion by token ids and a chat by text equal transformers' ``generate``. Both prompts are handed over."""
    model, tokenizer = save(model_type, tmp_path)
    expected, _ = generate(model, PROMPT, NUM_TOKENS)
    settings = LocalSettings.of(
        model=str(tmp_path), port=0, device="cpu", dtype="float32", threads=1, local_prefill="fallback", kv_memory_mb=16,
        room_timeout_s=120,
    )  # fmt: skip
    with LocalDeployment.from_settings(settings, tmp_path) as deployment:
        deployment.wait_ready(timeout_s=180)
        with httpx.Client(base_url=deployment.url, timeout=120) as client:
            completion = streamed(client, "/v1/completions", {"prompt": PROMPT, "return_token_ids": True})
            assert [token for choice in completion for token in choice["token_ids"]] == expected
            text = " ".join(f"w{token}" for token in PROMPT)
            assert tokenizer.encode(text).ids == PROMPT
            chat = streamed(client, "/v1/chat/completions", {"messages": [{"role": "user", "content": text}]})
            assert "".join(choice["delta"].get("content") or "" for choice in chat) == tokenizer.decode(expected)
        assert (
            sum(counter_values(deployment.admin_urls["decode-0"], "kvrelay_handoffs_total", {"outcome": "verified"}))
            == 2
        )
        wait_until_idle(deployment)
