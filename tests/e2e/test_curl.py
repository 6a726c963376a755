"""``curl``, as the documentation shows it: each API once whole and once streamed."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from kvrelay.launcher.local import LocalDeployment

from .conftest import wait_until_idle

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl"),
]

MESSAGES = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
PROMPT = "The capital of France is"


def curl(deployment: LocalDeployment, path: str, body: dict[str, Any], *options: str) -> str:
    """What it prints; fails if it, or the request, does."""
    json_header = ("-H", "Content-Type: application/json")
    command = ["curl", "--silent", "--show-error", "--fail-with-body", "--max-time", "240", *options, *json_header]
    done = subprocess.run(
        [*command, "-d", json.dumps(body), deployment.url + path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def data_lines(text: str) -> list[str]:
    """The data of a stream of events."""
    return [line.removeprefix("data:").strip() for line in text.splitlines() if line.startswith("data:")]


def test_chat_completions(deployment: LocalDeployment) -> None:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    whole = json.loads(curl(deployment, "/v1/chat/completions", body))
    text = whole["choices"][0]["message"]["content"]
    assert "Paris" in text
    assert whole["object"] == "chat.completion"
    *events, done = data_lines(curl(deployment, "/v1/chat/completions", {**body, "stream": True}, "-N"))
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == text
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    wait_until_idle(deployment)


def test_generate(deployment: LocalDeployment) -> None:
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 8, "details": True}}
    whole = json.loads(curl(deployment, "/generate", body))
    assert "Paris" in whole["generated_text"]
    assert whole["details"]["generated_tokens"] == 8
    events = [json.loads(event) for event in data_lines(curl(deployment, "/generate_stream", body, "-N"))]
    assert "".join(event["token"]["text"] for event in events) == whole["generated_text"]
    assert [event["generated_text"] for event in events] == [None] * 7 + [whole["generated_text"]]
    wait_until_idle(deployment)


def test_responses(deployment: LocalDeployment) -> None:
    body = {"input": MESSAGES[0]["content"], "temperature": 0, "max_output_tokens": 24}
    whole = json.loads(curl(deployment, "/v1/responses", body))
    text = whole["output"][0]["content"][0]["text"]
    assert (whole["object"], whole["status"]) == ("response", "completed")
    assert "Paris" in text
    events = [
        json.loads(line) for line in data_lines(curl(deployment, "/v1/responses", {**body, "stream": True}, "-N"))
    ]
    assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == text
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert (events[0]["type"], events[-1]["type"]) == ("response.created", "response.completed")
    wait_until_idle(deployment)


def test_a_refusal_has_a_status_and_a_reason(deployment: LocalDeployment) -> None:
    url = f"{deployment.url}/v1/completions"
    body = '{"prompt": "x", "top_p": 2}'
    header = "Content-Type: application/json"
    command = ["curl", "--silent", "--write-out", "\n%{http_code}", "-H", header, "-d", body, url]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answer, status = done.stdout.rsplit("\n", 1)
    assert status == "400"
    assert json.loads(answer)["error"]["param"] == "top_p"
