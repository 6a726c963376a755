"""Images by URL in chats of all APIs: they are as if they had come with the request, and nothing is fetched in vain."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message

from kvrelay.common.images import image_digest
from kvrelay.common.model_card import IMAGES_OFF
from kvrelay.gateway.errors import OverloadedError
from kvrelay.gateway.routing.admission import Admission
from kvrelay.gateway.settings import TraceSettings
from kvrelay.wire.messages import FailureCode, Submit

from ..collector import collector
from ..http.test_api_keys import ALICE, limited
from ..http_app import CHAT, TEXT, App, apps_for, saying
from ..pictures import part, picture, save_model, seeing_card, telling, text_of
from ..players import Player, failing, in_turn
from ..web_host import FETCH_S, Deadlines, WebHost, answer, redirect, silence, web_host

RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
TOKENIZE, CHAT_TOKENIZE = "/tokenize", "/chat_tokenize"
CAT, DOG = picture((8, 6)), picture((30, 2), "JPEG")
T_CAT, T_DOG = text_of((8, 6)).text, text_of((30, 2)).text
SECRET = "s3cret"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("seeing"))


@pytest.fixture
async def host() -> AsyncIterator[WebHost]:
    async with web_host() as found:
        found.files |= {"/cat": CAT, "/dog": DOG}
        yield found


@asynccontextmanager
async def serving(directory: Path, *hosts: WebHost, no_images: str = "", **settings: Any) -> AsyncIterator[App]:
    card, of_decode = seeing_card(no_images), seeing_card(IMAGES_OFF)
    async with apps_for(
        directory,
        {"": saying("x")},
        {"": of_decode},
        {"": (saying("x"), card)},
        served_model_name="tiny",
        image_hosts=tuple(host.entry for host in hosts),
        **settings,
    ) as apps:
        prefill(apps[""]).tell = telling
        yield apps[""]


@pytest.fixture
async def seeing(directory: Path, host: WebHost) -> AsyncIterator[App]:
    async with serving(directory, host) as app:
        yield app


def prefill(app: App) -> Player:
    assert app.prefill is not None
    return app.prefill


def body_of(path: str, *urls: str) -> dict[str, Any]:
    """A body of any API with a text and images."""
    text = {"type": "text", "text": "see"}
    match path:
        case "/v1/messages" | "/v1/messages/count_tokens":
            images = [{"type": "image", "source": {"type": "url", "url": url}} for url in urls]
            more = {"max_tokens": 5} if path == MESSAGES else {}
            return {"messages": [{"role": "user", "content": [text, *images]}], **more}
        case "/v1/responses":
            images = [{"type": "input_image", "image_url": url} for url in urls]
            return {"input": [{"role": "user", "content": [text, *images]}]}
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": [text, *images]}]}


GENERATING = [CHAT, RESPONSES, MESSAGES]
ALL = [*GENERATING, COUNT, TOKENIZE, CHAT_TOKENIZE]


@pytest.mark.parametrize("path", GENERATING)
async def test_a_fetched_image_is_as_if_it_had_come_with_the_request(seeing: App, host: WebHost, path: str) -> None:
    body = body_of(path, host.url("/cat?x=1"), host.url("/dog"))
    assert (await seeing.post(path, **body))["model"] == "tiny"
    [submit] = prefill(seeing).submits
    assert submit.token_ids == seeing.tokenizer.encode(f"<user>see{T_CAT}{T_DOG};", add_special_tokens=False)
    assert [(image.data, image.span.digest) for image in submit.images] == [
        (data, image_digest(data)) for data in (CAT, DOG)
    ]
    assert sorted(host.lines) == ["GET /cat?x=1 HTTP/1.1", "GET /dog HTTP/1.1"]
    assert (await seeing.client.post(path, json={**body, "stream": True})).status_code == 200
    assert prefill(seeing).submits[1].images == submit.images
    assert len(host.heads) == 4


async def test_images_of_the_body_and_of_the_web_keep_their_order(seeing: App, host: WebHost) -> None:
    content = [part(DOG), *body_of(CHAT, host.url("/cat"))["messages"][0]["content"], part(DOG)]
    await seeing.post(CHAT, messages=[{"role": "user", "content": content}])
    assert [image.data for image in prefill(seeing).submits[0].images] == [DOG, CAT, DOG]


async def test_tokens_are_counted(seeing: App, host: WebHost) -> None:
    prompt = f"<user>see{T_CAT};"
    ids = seeing.tokenizer.encode(prompt, add_special_tokens=False)
    assert await seeing.post(COUNT, **body_of(COUNT, host.url("/cat"))) == {"input_tokens": len(ids)}
    assert (await seeing.post(TOKENIZE, **body_of(TOKENIZE, host.url("/cat"))))["tokens"] == ids
    shown = await seeing.post(CHAT_TOKENIZE, **body_of(CHAT_TOKENIZE, host.url("/cat")))
    assert shown["templated_text"] == prompt
    assert len(host.heads) == 3


async def test_the_time_of_fetching_is_the_requests_own(seeing: App, host: WebHost) -> None:
    async def slowly(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.3)
        await answer(200, CAT)(writer)

    host.files["/slow"] = slowly
    seeing.client.headers["x-request-timeout"] = "30"
    await seeing.post(CHAT, **body_of(CHAT, host.url("/slow")))
    [submit] = prefill(seeing).submits
    assert submit.timeout_s is not None
    assert submit.timeout_s < 29.75
    metrics = (await seeing.client.get("/metrics")).text
    assert 'kvrelay_admission_wait_seconds_count{model="tiny"} 0.0' in metrics


async def test_choices_and_attempts_fetch_nothing_again(directory: Path, host: WebHost) -> None:
    async with serving(directory, host, relay={"max_attempts": 4}) as app:
        prefill(app).script = in_turn(failing(FailureCode.INTERNAL, after=1, retry_after_s=0.0), saying("x"))
        await app.post(CHAT, **body_of(CHAT, host.url("/cat")))
        assert [len(submit.images) for submit in prefill(app).submits] == [1, 1]
        assert len(host.heads) == 1
        prefill(app).script = saying("x")
        assert len((await app.post(CHAT, **body_of(CHAT, host.url("/cat")), n=3, temperature=1))["choices"]) == 3
        assert len(prefill(app).submits) == 5
        assert len(host.heads) == 2


def told(path: str, answered: Any) -> tuple[str, str]:
    """Kind and message of an error, in the shape of the API."""
    if path == CHAT_TOKENIZE:
        return answered["error_type"], answered["error"]
    error = answered["error"]
    if path not in (MESSAGES, COUNT):
        assert error["param"] in ("messages[0].content[2]", "input[0].content[2]")
    return error["type"], error["message"]


@pytest.mark.parametrize("path", ALL)
async def test_what_the_client_can_mend_is_told_where(seeing: App, host: WebHost, path: str) -> None:
    status, kind = (422, "validation") if path == CHAT_TOKENIZE else (400, "invalid_request_error")
    host.files |= {"/page": b"<html>", "/away": redirect(f"http://other.example/{SECRET}")}
    for url, says in (
        (f"https://other.example/{SECRET}", "is at https://other.example, which is not in --image-hosts"),
        (host.url(f"/gone?{SECRET}"), f"{host.entry} answers with status 404; check the URL"),
        (host.url(f"/page?{SECRET}"), "is no PNG, JPEG, WebP or GIF that can be read"),
        (host.url("/away"), f"{host.entry} redirects to http://other.example, which is not in --image-hosts"),
        (f"http://{SECRET}@localhost:{host.port}/", "it has a user or a password; leave them out"),
    ):
        answered = await seeing.client.post(path, json=body_of(path, host.url("/cat"), url))
        assert (answered.status_code, told(path, answered.json())[0]) == (status, kind)
        assert says in told(path, answered.json())[1]
        assert "content[2]" in answered.text
        assert SECRET not in answered.text
    assert prefill(seeing).submits == []


@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [
        (CHAT, 502, "server_error"),
        (RESPONSES, 502, "server_error"),
        (MESSAGES, 502, "api_error"),
        (COUNT, 502, "api_error"),
        (TOKENIZE, 502, "server_error"),
        (CHAT_TOKENIZE, 424, "generation"),
    ],
)
async def test_what_the_host_has_to_mend_is_told_with_its_name(
    seeing: App, host: WebHost, path: str, status: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.files |= {"/broken": answer(503), "/slow": Deadlines(monkeypatch).is_late(silence)}
    for name, says in (("broken", "answers with status 503"), ("slow", f"does not send it within {FETCH_S:g} s")):
        answered = await seeing.client.post(path, json=body_of(path, host.url("/cat"), host.url(f"/{name}?{SECRET}")))
        assert (answered.status_code, told(path, answered.json())[0]) == (status, kind)
        assert f"{host.entry} {says}" in told(path, answered.json())[1]
        assert SECRET not in answered.text
    assert prefill(seeing).submits == []


async def test_without_a_list_nothing_is_fetched(directory: Path, host: WebHost) -> None:
    async with serving(directory) as app:
        for path in GENERATING:
            answered = await app.post(path, 400, **body_of(path, host.url("/cat")))
            assert "--image-hosts of the gateway; it is empty, so this deployment fetches nothing" in str(answered)
        assert prefill(app).asked == []
    assert host.heads == []


async def test_images_are_bounded_together_with_those_of_the_body(
    seeing: App, host: WebHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.gateway.apis.prompts.MAX_IMAGES_NBYTES", len(CAT) + len(DOG))
    content = [part(DOG), *body_of(CHAT, host.url("/cat"))["messages"][0]["content"]]
    await seeing.post(CHAT, messages=[{"role": "user", "content": content}])
    host.files["/cat"] = CAT + b"x"
    error = (await seeing.post(CHAT, 400, messages=[{"role": "user", "content": content}]))["error"]
    assert error["param"] == "messages[0].content[2]"
    assert f"more than {len(CAT)} bytes, which are left for them" in error["message"]


async def test_a_request_that_cannot_be_served_fetches_nothing(
    directory: Path, host: WebHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = body_of(CHAT, host.url("/cat"))
    async with serving(directory, host, no_images="it has no encoder") as blind:
        for path in ALL:
            answered = await blind.client.post(path, json=body_of(path, host.url("/cat")))
            assert answered.status_code == (422 if path == CHAT_TOKENIZE else 400)
            assert "model 'tiny' reads no images: it has no encoder" in answered.text
    keys = limited(tmp_path, "tokens_per_minute=5 requests_per_s=0.001 burst=2")
    async with serving(directory, host, api_keys=keys) as app:
        assert (await app.client.post(CHAT, json=body)).status_code == 401
        used = await app.client.post(TEXT, json={"prompt": [1, 2, 3, 4], "max_tokens": 1}, headers=ALICE)
        assert used.status_code == 200
        for kind in ("tokens", "requests"):  # of which none is left
            answered = await app.client.post(CHAT, json=body, headers=ALICE)
            assert (answered.status_code, answered.json()["error"]["type"]) == (429, kind)
    async with serving(directory, host, max_body_bytes=2000) as app:
        await app.post(CHAT, 413, **body, user="x" * 2000)
        await app.post(CHAT, 400, **body, logit_bias={"a": 1})
        await app.post(CHAT, 400, **body, tool_choice="required")
        timeout = {"x-request-timeout": "soon"}
        assert (await app.client.post(CHAT, json=body, headers=timeout)).status_code == 400

        def full(*_: object) -> None:
            raise OverloadedError("the line is full", retry_after_s=1.0)

        monkeypatch.setattr(Admission, "check_not_full", full)
        for path in GENERATING:
            await app.post(path, 503, **body_of(path, host.url("/cat")))
    assert host.heads == []


async def test_a_client_that_leaves_ends_the_fetch(seeing: App, host: WebHost) -> None:
    host.files["/slow"] = silence
    body = json.dumps(body_of(CHAT, host.url("/slow"))).encode()
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await host.is_asked.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers, "query_string": b""}
    async with asyncio.timeout(20):
        await seeing.asgi(scope, receive, send)
        await host.left.wait()
    assert sent == []
    metrics = await seeing.metrics()
    assert metrics['kvrelay_image_fetch_seconds_count{outcome="given_up"}'] == 1
    assert metrics["kvrelay_client_disconnects_total"] == 1


async def test_a_request_may_have_less_time_than_its_images_take(seeing: App, host: WebHost) -> None:
    host.files["/slow"] = silence
    headers = {"x-request-timeout": "0.2"}
    answered = await seeing.client.post(CHAT, json=body_of(CHAT, host.url("/slow")), headers=headers)
    assert (answered.status_code, answered.json()["error"]["code"]) == (504, "timeout")


async def test_nothing_that_is_kept_logged_or_traced_has_a_path(
    directory: Path, host: WebHost, caplog: pytest.LogCaptureFixture
) -> None:
    """A URL may be signed. Traces tell how long the fetch took."""
    caplog.set_level(logging.DEBUG)
    host.files["/broken"] = answer(500)

    def script(player: Player, submit: Submit) -> None:
        player.fail(submit, FailureCode.INTERNAL, 0.0)

    with collector() as heard:
        traces = TraceSettings(trace_endpoint=heard.url, trace_sample=1.0)
        async with serving(directory, host, traces=traces, access_log=True) as app:
            for name, status in (("cat", 200), ("gone", 400), ("broken", 502)):
                url = host.url(f"/{name}?{SECRET}")
                answered = await app.client.post(CHAT, json=body_of(CHAT, url), headers={"x-request-id": name})
                assert answered.status_code == status
            prefill(app).script = script
            await app.post(CHAT, 502, **body_of(CHAT, host.url(f"/cat?{SECRET}")))
            shown = [(await app.client.get(path)).text for path in ("/debug/requests", "/debug/workers", "/metrics")]
    for text in (*shown, caplog.text, *map(str, heard.spans), *(str(one.proto) for one in heard.spans)):
        assert SECRET not in text
        assert "/cat" not in text
    [accept] = [one for one in heard.below(heard.root("cat")) if one.name == "accept"]
    [tokenize] = [one for one in heard.below(accept) if one.name == "tokenize"]
    [fetch] = heard.below(tokenize)
    assert fetch.name == "fetch_images"
    assert 0 < fetch.took_s <= tokenize.took_s
    assert heard.root("broken").attributes["error.type"] == "image_host_failed"
