"""How each field of OpenAI's routes reaches the workers, and the errors of refused fields."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrelay.common.retention import Retention
from kvrelay.common.sampling import BeamSearch, FinishReason, Guide, GuideKind, SampledToken, Watermark
from kvrelay.engine.fake.engine import fake_card
from kvrelay.gateway.http.api_keys import line_of
from kvrelay.wire.messages import Beam, Submit, Timings, TokenDelta, Tokens

from ..http_app import CHAT, TEXT, App, app_for, saying, tokens_of
from ..players import Player

USER = [{"role": "user", "content": "hand over"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def _guide(kind: GuideKind, text: Any = "") -> dict[str, Any]:
    return {"guide": Guide(kind=kind, text=text if isinstance(text, str) else json.dumps(text))}


BECOMES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "min_tokens": ({"min_tokens": 3}, {"min_tokens": 3}),
    "typical_p": ({"typical_p": 0.4}, {"typical_p": 0.4}),
    "filters": ({"top_k": 5, "top_p": 0.5, "min_p": 0.1}, {"top_k": 5, "top_p": 0.5, "min_p": 0.1}),
    "no top_k": ({"top_k": -1}, {"top_k": 0}),
    "penalties": (
        {"frequency_penalty": 1, "presence_penalty": -1, "repetition_penalty": 1.5},
        {"frequency_penalty": 1.0, "presence_penalty": -1.0, "repetition_penalty": 1.5},
    ),
    "logit_bias": ({"logit_bias": {"7": -100, "9": 2.5}}, {"logit_bias": ((7, -100.0), (9, 2.5))}),
    "allowed_token_ids": ({"allowed_token_ids": [5, 4, 5]}, {"allowed_token_ids": (5, 4)}),
    "as many allowed_token_ids as may be": ({"allowed_token_ids": [7] * 4096}, {"allowed_token_ids": (7,)}),
    "watermark": ({"watermark": True}, {"watermark": Watermark()}),
    "prompt_logprobs": ({"prompt_logprobs": 2}, {"num_prompt_logprobs": 2}),
    "json_object": ({"response_format": {"type": "json_object"}}, _guide(GuideKind.JSON_OBJECT)),
    "json_schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        _guide(GuideKind.JSON_SCHEMA, SCHEMA),
    ),
    "json_object with a schema": (  # as Hugging Face's InferenceClient writes it
        {"response_format": {"type": "json_object", "value": SCHEMA}},
        _guide(GuideKind.JSON_SCHEMA, SCHEMA),
    ),
    "json": ({"response_format": {"type": "json", "value": SCHEMA}}, _guide(GuideKind.JSON_SCHEMA, SCHEMA)),  # as TGI
    "structured json": ({"structured_outputs": {"json": SCHEMA}}, _guide(GuideKind.JSON_SCHEMA, SCHEMA)),
    "structured json as text": (
        {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}},
        _guide(GuideKind.JSON_SCHEMA, SCHEMA),
    ),
    "structured regex": ({"structured_outputs": {"regex": "a+"}}, _guide(GuideKind.REGEX, "a+")),
    "guided_choice": ({"guided_choice": ["yes", "no"]}, _guide(GuideKind.CHOICE, ["yes", "no"])),
    "guided_grammar": ({"guided_grammar": 'root ::= "x"'}, _guide(GuideKind.GRAMMAR, 'root ::= "x"')),
    "structural tag": (
        {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
        _guide(GuideKind.STRUCTURAL_TAG, {"type": "structural_tag", "format": {"type": "any_text"}}),
    ),
    "no guide": ({"response_format": {"type": "text"}, "structured_outputs": {"json": None}}, {"guide": None}),
}


async def test_what_fields_become(app: App) -> None:
    for name, (fields, expected) in BECOMES.items():
        await app.post(TEXT, prompt="x", **fields)
        sampling = app.player.submits[-1].sampling
        assert {field: getattr(sampling, field) for field in expected} == expected, name


async def test_stop_tokens_are_beside_the_models_own(app: App) -> None:
    await app.post(TEXT, prompt="x", stop_token_ids=[9, 9, 8])
    assert app.player.submits[-1].sampling.stop_token_ids == (*app.tokenizer.eos_ids, 9, 8)
    await app.post(TEXT, prompt="x", stop_token_ids=[9], ignore_eos=True)
    assert app.player.submits[-1].sampling.stop_token_ids == (9,)


async def test_bad_words_are_spelled_with_and_without_a_space(app: App) -> None:
    await app.post(TEXT, prompt="x", bad_words=["relay", ""])
    spelled = [app.tokenizer.decode(ids) for ids in app.player.submits[-1].sampling.bad_words]
    assert spelled == ["relay", " relay"]


async def test_the_operators_processors_go_by_name(model_directory: Path) -> None:
    card = msgspec.structs.replace(fake_card(vocab_size=300, num_blocks=128), processors=("quiet", "calm"))
    async with app_for(model_directory, saying("x"), card=card) as app:
        await app.post(TEXT, prompt="x", logits_processors=["quiet"])
        assert app.player.submits[-1].sampling.processors == ("quiet",)
        error = (await app.post(TEXT, 400, prompt="x", logits_processors=["loud"]))["error"]
        assert "calm, quiet" in error["message"]


async def test_retention_hints_travel(app: App) -> None:
    for fields, expected in (
        ({}, None),
        ({"cache_ttl": 60}, Retention(priority=80, ttl_s=60.0)),
        ({"cache_priority": 5}, Retention(priority=5)),
        ({"cache_priority": 100, "cache_ttl": 1.5}, Retention(priority=100, ttl_s=1.5)),
    ):
        await app.post(CHAT, messages=USER, **fields)
        assert app.player.submits[-1].retention == expected


async def test_a_tier_moves_the_request_in_the_line(app: App) -> None:
    for fields, expected in (
        ({}, 0),
        ({"service_tier": "auto"}, 0),
        ({"service_tier": "flex"}, 10),
        ({"service_tier": "priority", "priority": 3}, -7),
        ({"service_tier": "fast"}, -10),
    ):
        await app.post(CHAT, messages=USER, **fields)
        assert app.player.submits[-1].flow.priority == expected, fields


async def test_the_template_hears_of_the_effort(thinking_directory: Path) -> None:
    (thinking_directory / "chat_template.jinja").write_text("effort {{ reasoning_effort }}")
    async with app_for(thinking_directory, saying("x")) as app:
        for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max"):
            await app.post(CHAT, messages=USER, reasoning_effort=effort)
            await app.post("/v1/responses", input="x", reasoning={"effort": effort})
            prompts = [app.tokenizer.decode_all(submit.token_ids) for submit in app.player.submits[-2:]]
            assert prompts == [f"effort {effort}"] * 2


BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": USER}, TEXT: {"prompt": "x"}, "/v1/responses": {"input": "x"}}


@pytest.mark.parametrize("path", BODIES)
async def test_a_cache_salt_travels(app: App, path: str) -> None:
    for salt in (None, "mine"):
        await app.post(path, **BODIES[path], cache_salt=salt)
        assert app.player.submits[-1].cache_salt == (salt or "")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_fields_that_nobody_knows_are_named(
    app: App, caplog: pytest.LogCaptureFixture, path: str, is_stream: bool
) -> None:
    body = {**BODIES[path], "user": "u", "stream": is_stream}
    unknown = {"temprature": 0, "store": False, "a\nb": 1, **{f"f{index}": 1 for index in range(20)}}
    for _ in range(2):
        answer = await app.client.post(path, json={**body, **unknown})
        named = answer.headers["x-ignored-fields"].split(", ")
        assert named == ["temprature", *(f"f{index}" for index in range(15)), "and 6 more"]
    known = await app.client.post(path, json=body)
    assert "x-ignored-fields" not in known.headers
    assert len([one for one in caplog.records if "temprature" in one.getMessage()]) == 1


# -- fields of the answer ------------------------------------------------------------------------------------------


async def test_the_stop_string_and_why_it_ended(model_directory: Path) -> None:
    async with app_for(model_directory, saying("one two three")) as app:
        choice = (await app.post(TEXT, prompt="x", max_tokens=99, stop=["zzz", " two"]))["choices"][0]
        assert (choice["text"], choice["stop_reason"], choice["finish_reason"]) == ("one", " two", "stop")
        fields = {"stop": " two", "include_stop_str_in_output": True}
        assert (await app.post(TEXT, prompt="x", max_tokens=99, **fields))["choices"][0]["text"] == "one two"
        longest = (await app.post(TEXT, prompt="x", max_tokens=99, stop="z" * 1024))["choices"][0]
        assert longest["text"] == "one two three"
        late = (await app.post(TEXT, prompt="x", max_tokens=99, stop=["o"], min_tokens=10))["choices"][0]
        num_tokens = len(app.tokenizer.encode("one two", add_special_tokens=False))
        assert len(late["text"]) >= len("one tw") if num_tokens < 10 else late["text"]
        assert (await app.post(TEXT, prompt="x", max_tokens=99))["choices"][0]["stop_reason"] is None


async def test_a_stop_token_is_the_reason(model_directory: Path) -> None:
    def script(player: Player, submit: Submit) -> None:
        player.tokens(submit, 0, [20, 21, 9], FinishReason.STOP)

    async with app_for(model_directory, script) as app:
        choice = (await app.post(TEXT, prompt="x", stop_token_ids=[9], return_token_ids=True))["choices"][0]
        assert (choice["stop_reason"], choice["finish_reason"]) == (9, "stop")
        assert choice["token_ids"] == [20, 21, 9]
        assert choice["text"] == app.tokenizer.decode([20, 21])
        shown = await app.post(TEXT, prompt="x", stop_token_ids=[9], include_stop_str_in_output=True)
        assert shown["choices"][0]["text"] == app.tokenizer.decode([20, 21, 9])


async def test_special_tokens_are_shown_on_demand(model_directory: Path) -> None:
    async with app_for(model_directory, lambda player, submit: None) as app:
        special = min(app.tokenizer.skipped_ids)

        def script(player: Player, submit: Submit) -> None:
            player.tokens(submit, 0, [20, special, 21], FinishReason.LENGTH)

        app.player.script = script
        hidden = (await app.post(TEXT, prompt="x", ignore_eos=True))["choices"][0]["text"]
        shown = (await app.post(TEXT, prompt="x", ignore_eos=True, skip_special_tokens=False))["choices"][0]["text"]
        assert hidden == app.tokenizer.decode([20, 21])
        assert app.tokenizer.token_text(special) in shown


async def test_echo(model_directory: Path) -> None:
    async with app_for(model_directory, saying(" the baton", end=FinishReason.LENGTH)) as app:
        plain = (await app.post(TEXT, prompt="hand over", echo=True))["choices"][0]
        assert (plain["text"], plain["logprobs"]) == ("hand over the baton", None)
        both = await app.post(TEXT, prompt=["hand over", "run"], echo=True, n=2)
        assert [choice["text"] for choice in both["choices"]] == ["hand over the baton"] * 2 + ["run the baton"] * 2
        shown = (await app.post(TEXT, prompt="hand over", echo=True, logprobs=2))["choices"][0]["logprobs"]
        assert "".join(shown["tokens"]) == "hand over the baton"
        prompt_len = len(app.tokenizer.encode("hand over", add_special_tokens=False))
        assert shown["token_logprobs"][:2] == [None, -0.25]
        assert shown["token_logprobs"][prompt_len] == -0.5
        assert shown["top_logprobs"][0] is None
        assert shown["text_offset"] == [len("".join(shown["tokens"][:index])) for index in range(len(shown["tokens"]))]
        events = await app.events(TEXT, prompt="hand over", echo=True, logprobs=2)
        assert "".join(event["choices"][0]["text"] for event in events) == "hand over the baton"
        pieces = [piece for event in events for piece in event["choices"][0]["logprobs"]["tokens"]]
        assert pieces == shown["tokens"]


async def test_no_output_at_all(model_directory: Path) -> None:
    """With ``max_tokens`` 0 and ``echo`` the answer has the prompt's log probabilities and no output, as evaluation tools ask."""
    async with app_for(model_directory, saying("x", end=FinishReason.LENGTH)) as app:
        answer = await app.post(TEXT, prompt="hand over", echo=True, logprobs=1, max_tokens=0)
        assert answer["choices"][0]["text"] == "hand over"
        assert answer["choices"][0]["finish_reason"] == "length"
        assert "".join(answer["choices"][0]["logprobs"]["tokens"]) == "hand over"
        assert answer["usage"]["completion_tokens"] == 0
        assert app.player.submits[-1].sampling.max_tokens == 1


async def test_prompt_logprobs(model_directory: Path) -> None:
    async with app_for(model_directory, saying("x", end=FinishReason.LENGTH)) as app:
        ids = app.tokenizer.encode("hand over", add_special_tokens=False)
        text = (await app.post(TEXT, prompt="hand over", prompt_logprobs=2, n=2))["choices"]
        for choice in text:
            shown = choice["prompt_logprobs"]
            assert shown[0] is None
            assert [next(iter(entry)) for entry in shown[1:]] == [str(token_id) for token_id in ids[1:]]
            assert shown[1][str(ids[1])] == {
                "logprob": -0.25,
                "rank": 1,
                "decoded_token": app.tokenizer.token_text(ids[1]),
            }
            assert shown[1]["3"]["rank"] == 2
        chat = await app.post(CHAT, messages=USER, prompt_logprobs=0)
        assert len(chat["prompt_logprobs"]) == len(app.player.submits[-1].token_ids)
        events = await app.events(CHAT, messages=USER, prompt_logprobs=0)
        assert sum("prompt_logprobs" in event for event in events) == 1


def tells_prompt_late(player: Player, submit: Submit) -> None:
    """One worker says " one two three"; another tells the first token and the prompt's log probabilities later."""
    tokens = tokens_of(player.tokenizer, " one two three")
    player.tokens(submit, 0, tokens[:2], timings=Timings(transfer_s=0.01))
    player.tokens(submit, 2, tokens[2:], FinishReason.LENGTH)
    if submit.sampling.num_prompt_logprobs is not None:
        known = [SampledToken(token_id, -0.25, ((token_id, -0.25), (3, -2.0))) for token_id in submit.token_ids[1:]]
        tell = partial(player.tokens, submit, 0, tokens[:1], timings=Timings(prefill_s=0.01), prompt_logprobs=known)
        asyncio.get_running_loop().call_later(0.05, tell)


async def test_a_stream_echoes_the_log_probabilities_that_the_whole_answer_does(model_directory: Path) -> None:
    """Also if the prompt's come behind all output, or behind all of it that a stop string leaves."""
    async with app_for(model_directory, tells_prompt_late) as app:
        wishes = {"prompt": ["hand over", "run on"], "echo": True, "logprobs": 2, "n": 2, "stop": " three"}
        whole = (await app.post(TEXT, **wishes))["choices"]
        events = await app.events(TEXT, **wishes)
        assert len(whole) == 4
        for choice in whole:
            assert choice["logprobs"]["token_logprobs"][:2] == [None, -0.25]
            parts = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
            assert "".join(part["text"] for part in parts) == choice["text"]
            assert parts[-1]["finish_reason"] == choice["finish_reason"] == "stop"
            for name, values in choice["logprobs"].items():
                assert [value for part in parts for value in part["logprobs"][name]] == values


async def test_what_backs_an_answer(app: App) -> None:
    answers = [await app.post(TEXT, prompt="x"), await app.post(CHAT, messages=USER)]
    answers += await app.events(CHAT, messages=USER)
    fingerprints = {answer["system_fingerprint"] for answer in answers}
    assert len(fingerprints) == 1
    assert fingerprints.pop().startswith("fp_")


# -- several choices -----------------------------------------------------------------------------------------------


def _by_choice(texts: list[str], logprobs: list[float]) -> Any:
    def script(player: Player, submit: Submit) -> None:
        choice = submit.sampling.choice
        tokens = [
            SampledToken(token.token_id, logprobs[choice]) for token in tokens_of(player.tokenizer, texts[choice])
        ]
        player.tokens(submit, 0, tokens, FinishReason.STOP)

    return script


async def test_choices_have_noise_of_their_own_and_one_seed(model_directory: Path) -> None:
    texts = ["one", "two", "three"]
    async with app_for(model_directory, _by_choice(texts, [-1.0] * 3)) as app:
        whole = await app.post(CHAT, messages=USER, n=3)
        assert [choice["message"]["content"] for choice in whole["choices"]] == texts
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
        samplings = [submit.sampling for submit in app.player.submits]
        assert [sampling.choice for sampling in samplings] == [0, 1, 2]
        assert len({sampling.seed for sampling in samplings}) == 1
        assert len({submit.request_id for submit in app.player.submits}) == 3
        prompt = app.player.submits[0].token_ids
        lengths = [len(app.tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        assert whole["usage"]["prompt_tokens"] == len(prompt), "a prompt counts once"
        assert whole["usage"]["completion_tokens"] == sum(lengths)
        events = await app.events(CHAT, messages=USER, n=3)
        streamed = ["", "", ""]
        for event in events:
            streamed[event["choices"][0]["index"]] += event["choices"][0]["delta"].get("content", "")
        assert streamed == texts
        roles = [event["choices"][0]["index"] for event in events if "role" in event["choices"][0]["delta"]]
        assert roles == [0, 1, 2]


async def test_the_best_of_several(model_directory: Path) -> None:
    """``best_of`` sorts choices by their log probability per token, so that their length does not count."""
    texts, logprobs = ["a long one indeed", "two", "three"], [-0.5, -2.0, -0.1]
    async with app_for(model_directory, _by_choice(texts, logprobs)) as app:
        whole = await app.post(TEXT, prompt=["x", "y"], n=2, best_of=3)
        assert [choice["text"] for choice in whole["choices"]] == ["three", texts[0]] * 2
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
        assert all(choice["logprobs"] is None for choice in whole["choices"])
        lengths = [len(app.tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        assert whole["usage"]["completion_tokens"] == 2 * sum(lengths), "what was generated counts, not what is shown"


def _beams(player: Player, submit: Submit) -> None:
    beams = [
        Beam(tokens=tokens_of(player.tokenizer, text), finish_reason=reason, score=-1.0)
        for text, reason in (("first", FinishReason.STOP), ("second", FinishReason.LENGTH))
    ]
    item = TokenDelta(
        request_id=submit.request_id,
        attempt=1,
        index=0,
        tokens=[],
        finish_reason=FinishReason.STOP,
        beams=beams,
    )
    player.say(Tokens(items=[item]))


async def test_a_beam_search(model_directory: Path) -> None:
    async with app_for(model_directory, _beams) as app:
        fields = {"use_beam_search": True, "beam_width": 4, "n": 2, "length_penalty": 0.5, "early_stopping": "never"}
        whole = await app.post(TEXT, prompt="x", **fields)
        assert [choice["text"] for choice in whole["choices"]] == ["first", "second"]
        assert [choice["finish_reason"] for choice in whole["choices"]] == ["stop", "length"]
        (submit,) = app.player.submits
        assert submit.sampling.beam_search == BeamSearch(width=4, num_return=2, length_penalty=0.5, early_stopping=None)
        chat = await app.post(CHAT, messages=USER, use_beam_search=True, n=2)
        assert [choice["message"]["content"] for choice in chat["choices"]] == ["first", "second"]
        assert app.player.submits[-1].sampling.beam_search == BeamSearch(width=2, num_return=2)


async def test_the_tokens_of_beams_count_as_others_do(model_directory: Path, tmp_path: Path) -> None:
    """In the key's budget and share, the metrics and the records."""
    keys = tmp_path / "keys"
    keys.write_text(f"{line_of('alice', 'a')} tokens_per_minute=1000 operator=1\n")
    async with app_for(model_directory, _beams, api_keys=str(keys)) as app:
        headers = {"authorization": "Bearer a"}
        fields = {"prompt": "x", "use_beam_search": True, "beam_width": 4, "n": 2, "max_tokens": 20}
        usage = (await app.client.post(TEXT, json=fields, headers=headers)).json()["usage"]
        assert usage["completion_tokens"] == sum(len(tokens_of(app.tokenizer, text)) for text in ("first", "second"))
        told = await app.client.get("/debug/requests", headers=headers)
        assert told.headers["x-ratelimit-remaining-tokens"] == str(1000 - usage["total_tokens"])
        (sequence,) = told.json()["requests"][0]["sequences"]
        assert sequence["num_output_tokens"] == usage["completion_tokens"]
        assert sequence["first_token_s"] is not None
        metrics = await app.metrics()
    assert metrics['kvrelay_gateway_output_tokens_total{model="tiny"}'] == usage["completion_tokens"]
    completion = metrics['kvrelay_api_key_tokens_total{key="alice",kind="completion",model="tiny"}']
    assert completion == usage["completion_tokens"]
