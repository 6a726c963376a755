"""The access log and metrics: the key of each request, and its tokens."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from kvrelay.gateway.http.api_keys import line_of
from kvrelay.wire.messages import FailureCode, Submit

from ..http_app import CHAT, TEXT, app_for, saying, tokens_of
from ..players import Player

SECRET = "kr-secret"
SAID = "the baton is here"


async def test_requests_are_told_by_key_and_model_but_not_their_text(
    model_directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{line_of('alice', SECRET)}\n{line_of('bob', 'b')} requests_per_s=0.001\n")
    caplog.set_level(logging.INFO, logger="kvrelay.gateway.desk.access")
    async with app_for(model_directory, saying(SAID), api_keys=str(keys), access_log=True) as app:
        mine = {"authorization": f"Bearer {SECRET}"}
        # Prometheus takes a counter's first value as its beginning, so it must not be what a first request used.
        for sample in ('key="alice",kind="completion"', 'key="bob",kind="prompt"'):
            assert (
                f'kvrelay_api_key_tokens_total{{{sample},model="tiny"}} 0.0' in (await app.client.get("/metrics")).text
            )

        async def ask(path: str, headers: dict[str, str], **body: Any) -> None:
            await app.client.post(path, json=body, headers=headers)

        message = {"messages": [{"role": "user", "content": "hand over"}]}
        await ask(CHAT, {**mine, "x-request-id": "mine"}, **message, n=2, stream=True)
        await ask(TEXT, mine, prompt="one relay", n=0)
        await ask(CHAT, {}, **message)
        for _ in range(2):
            await ask(TEXT, {"x-api-key": "b"}, prompt="x", n=0)
        await app.client.get("/v1/models", headers=mine)
        metrics = await app.metrics()
        num_prompt = len(app.player.submits[0].token_ids)
        num_said = 2 * len(app.tokenizer.encode(SAID, add_special_tokens=False))
    said = [record.__dict__ for record in caplog.records if record.name == "kvrelay.gateway.desk.access"]
    served, refused, unknown, _, throttled = said
    fields = served["fields"]
    assert 0 <= fields.pop("ttft_s") <= fields.pop("total_s")
    assert (served["request_id"], served["message"]) == ("mine", f"POST {CHAT}")
    assert fields == {
        "outcome": "200",
        "model": "tiny",
        "api_key": "alice",
        "prompt_tokens": num_prompt,
        "completion_tokens": num_said,
        "cached_tokens": 0,
    }
    assert [refused["fields"][name] for name in ("outcome", "api_key", "ttft_s")] == ["400", "alice", None]
    assert [unknown["fields"][name] for name in ("outcome", "api_key", "model")] == ["401", None, ""]
    assert [throttled["fields"][name] for name in ("outcome", "api_key")] == ["429", "bob"]
    assert not any(word in str(record) for record in (served, refused, unknown) for word in (SECRET, "hand over", SAID))
    counted = {name: value for name, value in metrics.items() if name.startswith("kvrelay_api_key_tokens_total")}
    assert counted == {
        'kvrelay_api_key_tokens_total{key="alice",kind="prompt",model="tiny"}': num_prompt,
        'kvrelay_api_key_tokens_total{key="alice",kind="completion",model="tiny"}': num_said,
    }


async def test_what_a_later_prompt_got_counts_also_if_the_first_one_got_nothing(
    model_directory: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(line_of("alice", SECRET) + "\n")
    submits: list[Submit] = []

    def script(player: Player, submit: Submit) -> None:
        submits.append(submit)
        if len(submits) == 2:
            player.tokens(submits[1], 0, tokens_of(player.tokenizer, "the"))
            player.fail(submits[0], FailureCode.DEADLINE)

    async with app_for(model_directory, script, api_keys=str(keys)) as app:
        body = {"prompt": ["one", "two"], "stream": True, "max_tokens": 9}
        answer = await app.client.post(TEXT, json=body, headers={"x-api-key": SECRET})
        assert "timeout" in answer.text
        metrics = await app.metrics()
    counted = metrics['kvrelay_api_key_tokens_total{key="alice",kind="completion",model="tiny"}']
    assert counted == len(tokens_of(app.tokenizer, "the"))


async def test_no_line_without_the_setting(model_directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with app_for(model_directory, saying(SAID)) as app:
        await app.post(TEXT, prompt="one relay")
        assert not [metric for metric in await app.metrics() if "api_key" in metric], "nobody has a key"
    assert not [record for record in caplog.records if record.name.endswith(".access")]
