"""API keys: their file of hashes, the routes that need one, and their limits on requests and tokens."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from functools import partial
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiMessage

from kvrelay.common.errors import SettingsError
from kvrelay.engine.fake.engine import fake_card
from kvrelay.gateway.errors import UnauthorizedError
from kvrelay.gateway.http.api_keys import ApiKeys, KeyUse, hash_key
from kvrelay.gateway.http.edge import Edge
from kvrelay.gateway.http.key_tokens import exchange
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.workers.pool import WorkerPool, static_workers
from kvrelay.wire.messages import Hello, HelloRefused, KeyTokens, Message, Role, Submit, Welcome
from kvrelay.wire.network import Network
from kvrelay.worker.key_tokens import KeyTokensBoard

from ..clock import Clock
from ..http_app import CHAT, app_for, saying
from ..players import LINKS, Player, good, until


def keys_file(tmp_path: Path, *names: str) -> Path:
    path = tmp_path / "keys"
    path.write_text(
        "# who may ask\n\n" + "".join(f"{name} {hash_key(f'key-of-{name}')}  # since May\n" for name in names)
    )
    return path


def test_a_key_is_known_by_its_name(tmp_path: Path) -> None:
    keys = ApiKeys(keys_file(tmp_path, "alice", "bob"), time.monotonic)
    assert keys.check("Bearer key-of-bob") == "bob"
    assert keys.check("bearer  key-of-alice") == "alice"


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (None, "no API key"),
        ("", "no API key"),
        ("Bearer ", "no API key"),
        ("Basic key-of-alice", "no API key"),
        ("key-of-alice", "no API key"),
        ("Bearer key-of-eve", "not known"),
        ("Bearer " + hash_key("key-of-alice"), "not known"),
        ("Bearer \udcff", "not known"),
    ],
)
def test_everything_else_is_refused(tmp_path: Path, header: str | None, text: str) -> None:
    keys = ApiKeys(keys_file(tmp_path, "alice"), time.monotonic)
    with pytest.raises(UnauthorizedError, match=text) as caught:
        keys.check(header)
    assert "eve" not in str(caught.value)


def test_a_changed_file_is_read_again(tmp_path: Path, clock: Clock) -> None:
    path = keys_file(tmp_path, "alice")
    keys = ApiKeys(path, clock)
    new = tmp_path / "new"
    new.write_text(f"bob {hash_key('key-of-bob')}\n")
    os.replace(new, path)
    with pytest.raises(UnauthorizedError):
        keys.check("Bearer key-of-bob")  # the file was read less than a second ago
    clock.now_s += 1.5
    assert keys.check("Bearer key-of-bob") == "bob"
    with pytest.raises(UnauthorizedError):
        keys.check("Bearer key-of-alice")


@pytest.mark.parametrize("content", [None, "", "alice secret\n"])
def test_a_file_that_breaks_costs_nobody_access(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, content: str | None
) -> None:
    path = keys_file(tmp_path, "alice")
    keys = ApiKeys(path, clock)
    path.unlink()
    if content is not None:
        path.write_text(content)
        os.utime(path, ns=(1, 1))
    clock.now_s += 1.5
    assert keys.check("Bearer key-of-alice") == "alice"
    assert "the keys read before stay in force" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("# nobody\n", "has no key, so nobody could ask"),
        ("alice hunter2\n", "line 1 of .* is not 'NAME SHA256'"),
        (f"a {'0' * 64}\na {'1' * 64}\n", "line 2 of .* the name 'a' a second time"),
        (f"a {'0' * 64} concurrency=0", "line 1 of .*: concurrency must be above 0"),
        (f"a {'0' * 64} min_priority=3000", "line 1 of .*: min_priority must be -2000 to 2000"),
        (f"a {'0' * 64} weight=0.0001", "line 1 of .*: weight must be 0.001 to 1000"),
        (f"a {'0' * 64} concurrency=many", "line 1 of .* is not 'NAME SHA256' .*, with requests_per_s=NUMBER"),
        ("a b\udcff", "cannot read"),
    ],
)
def test_a_bad_file_is_named_at_the_start(tmp_path: Path, content: str, text: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(SettingsError, match=text) as caught:
        ApiKeys(path, time.monotonic)
    assert "hunter2" not in str(caught.value)


async def test_only_the_api_asks_for_a_key(tmp_path: Path, model_directory: Path) -> None:
    """Probes and metrics need no key. A request without a valid key gets a 401 of OpenAI's shape and reaches no worker."""
    body = {"messages": [{"role": "user", "content": "hand over"}], "max_tokens": 2}
    async with app_for(model_directory, good, api_keys=str(keys_file(tmp_path, "alice"))) as app:
        for path in ("/health/live", "/health/ready", "/metrics"):
            assert (await app.client.get(path)).status_code == 200
        for headers in ({}, {"authorization": "Bearer key-of-eve"}):
            refused = await app.client.post(CHAT, json=body, headers=headers)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert (await app.client.get("/v1/models", headers=headers)).status_code == 401
        assert app.player.submits == []
        accepted = await app.client.post(CHAT, json=body, headers={"authorization": "Bearer key-of-alice"})
        assert accepted.status_code == 200
        assert len(app.player.submits) == 1


async def test_a_key_at_its_limit_gets_429_until_one_of_its_requests_is_over(tmp_path: Path) -> None:
    path = keys_file(tmp_path, "alice", "bob")
    path.write_text(path.read_text().replace("  # since May", " concurrency=1", 1))
    begun: asyncio.Queue[asyncio.Event] = asyncio.Queue()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.put_nowait(may_end := asyncio.Event())
        await may_end.wait()
        await Response()(scope, receive, send)

    edge = Edge(app, (), 100, 60.0, GatewayMetrics(CollectorRegistry()), ApiKeys(path, time.monotonic))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(edge), base_url="http://x") as client:
        alice, bob = ({"authorization": f"Bearer key-of-{name}"} for name in ("alice", "bob"))
        running = [asyncio.create_task(client.get("/", headers=alice))]
        ends = [await begun.get()]
        refused = await client.get("/", headers=alice)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        running.append(asyncio.create_task(client.get("/", headers=bob)))
        ends.append(await begun.get())
        ends[0].set()
        assert (await running[0]).status_code == 200
        running.append(asyncio.create_task(client.get("/", headers=alice)))
        ends.append(await begun.get())
        for end in ends:
            end.set()
        assert {answer.status_code for answer in await asyncio.gather(*running)} == {200}


async def test_only_a_key_that_may_passes_the_line(tmp_path: Path, model_directory: Path) -> None:
    """Two requests with a high priority wait for the only place. The one whose key allows that priority is served first."""
    body = {"prompt": "hand over", "max_tokens": 2, "priority": -1000}
    path = keys_file(tmp_path, "bob", "alice")
    path.write_text(path.read_text().replace("  # since May", " min_priority=-5", 1))
    begun: asyncio.Queue[tuple[Player, Submit]] = asyncio.Queue()
    served: list[str] = []
    card = fake_card(vocab_size=300, num_blocks=3)
    async with app_for(
        model_directory,
        lambda *play: begun.put_nowait(play),
        api_keys=str(path),
        card=card,
        relay={"room_timeout_s": 60.0},
    ) as app:

        async def ask(name: str) -> None:
            headers = {"authorization": f"Bearer key-of-{name}"}
            assert (await app.client.post("/v1/completions", json=body, headers=headers)).status_code == 200
            served.append(name)

        tasks = [asyncio.create_task(ask("alice"))]
        plays = [await asyncio.wait_for(begun.get(), 20)]
        for name in ("alice", "bob"):
            tasks.append(asyncio.create_task(ask(name)))
            while (await app.metrics()).get('kvrelay_requests_queued{model="tiny"}', 0) < len(tasks) - 1:
                await asyncio.sleep(0)
        for _ in tasks[1:]:
            good(*plays[-1])
            plays.append(await asyncio.wait_for(begun.get(), 20))
        good(*plays[-1])
        await asyncio.gather(*tasks)
        assert served == ["alice", "bob", "alice"]


def limited(tmp_path: Path, limits: str) -> str:
    path = keys_file(tmp_path, "alice")
    path.write_text(path.read_text().replace("  # since May", f" {limits}"))
    return str(path)


ALICE = {"authorization": "Bearer key-of-alice"}


def duration_s(text: str) -> float:
    """What a header such as 1m40s says."""
    found = re.fullmatch(r"(?:(\d+)m)?(\d+)s", text)
    assert found is not None, text
    return 60 * int(found[1] or 0) + int(found[2])


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_key_gets_429_when_its_tokens_are_used(tmp_path: Path, model_directory: Path, is_stream: bool) -> None:
    """A request reserves its prompt and ``max_tokens``, and is charged what it used. Headers tell what was left at its start."""
    keys = limited(tmp_path, "tokens_per_minute=60 tokens_per_day=5000")
    body = {"prompt": [1, 2, 3, 4], "max_tokens": 40, "stream": is_stream}
    async with app_for(model_directory, saying("four"), api_keys=keys) as app:

        async def ask(path: str = "/v1/completions", **more: object) -> httpx.Response:
            return await app.client.post(path, json={**body, **more}, headers=ALICE)

        begun_s = time.monotonic()
        first = await ask()
        assert first.status_code == 200
        assert [first.headers[f"x-ratelimit-{name}-tokens"] for name in ("limit", "remaining")] == ["60", "16"]
        num_used = 4 + len(app.tokenizer.encode("four", add_special_tokens=False))
        refused = await ask(max_tokens=56)
        passed_s = time.monotonic() - begun_s
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "tokens")
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert 60 - passed_s <= int(refused.headers["retry-after"]) <= 61
        assert refused.headers["x-ratelimit-remaining-tokens"] == str(60 - num_used)
        assert 60 - passed_s <= duration_s(refused.headers["x-ratelimit-reset-tokens"]) <= 61
        unfit = await ask(max_tokens=57)
        assert (unfit.status_code, "retry-after" in unfit.headers) == (400, False)
        messages = await app.client.post(
            "/v1/messages",
            json={"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]},
            headers={"x-api-key": "key-of-alice"},
        )
        assert (messages.status_code, messages.json()["error"]["type"]) == (429, "rate_limit_error")
        assert "retry-after" in messages.headers
        assert len(app.player.submits) == 1
        rest = await ask(max_tokens=56 - num_used)
        assert rest.status_code == 200


async def test_what_no_worker_answers_costs_no_tokens(tmp_path: Path, model_directory: Path) -> None:
    keys = limited(tmp_path, "tokens_per_minute=60")
    body = {"prompt": [1, 2, 3, 4], "max_tokens": 40}
    async with app_for(
        model_directory, lambda *_: None, api_keys=keys, relay={"request_timeout_s": 0.1, "room_timeout_s": 0.1}
    ) as app:
        for _ in range(3):
            answer = await app.client.post("/v1/completions", json=body, headers=ALICE)
            assert (answer.status_code, answer.headers["x-ratelimit-remaining-tokens"]) == (504, "16")


@pytest.mark.parametrize("leaves", [True, False], ids=["it leaves", "its own timeout passes"])
async def test_a_client_that_gives_up_before_the_first_token_pays_for_its_prompt(
    tmp_path: Path, model_directory: Path, leaves: bool
) -> None:
    """A worker may have computed it. Otherwise a client that always leaves in time would pass any budget."""
    keys = limited(tmp_path, "tokens_per_minute=60")
    body = {"prompt": [1, 2, 3, 4], "max_tokens": 40}
    begun = asyncio.Event()
    async with app_for(model_directory, lambda *_: begun.set(), api_keys=keys) as app:
        if leaves:
            await _leave_after(begun, app.asgi, json.dumps(body).encode())
        else:
            headers = {**ALICE, "x-request-timeout": "1"}
            assert (await app.client.post("/v1/completions", json=body, headers=headers)).status_code == 504
        await asyncio.wait_for(begun.wait(), 20)
        told = await app.client.get("/v1/models", headers=ALICE)
        assert told.headers["x-ratelimit-remaining-tokens"] == "56"
        counted = {name: value for name, value in (await app.metrics()).items() if "api_key_tokens_total" in name}
    assert counted == {'kvrelay_api_key_tokens_total{key="alice",kind="prompt",model="tiny"}': 4}


async def _leave_after(begun: asyncio.Event, app: ASGIApp, body: bytes) -> None:
    """Ask for a completion, and leave when a worker has begun it."""
    messages: asyncio.Queue[AsgiMessage] = asyncio.Queue()
    messages.put_nowait({"type": "http.request", "body": body, "more_body": False})

    async def send(message: AsgiMessage) -> None:
        raise AssertionError(f"nobody is there to read {message}")

    headers = [(b"content-type", b"application/json"), (b"authorization", b"Bearer key-of-alice")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
    asked = asyncio.create_task(app(scope, messages.get, send))
    await asyncio.wait_for(begun.wait(), 20)
    messages.put_nowait({"type": "http.disconnect"})
    await asked


async def test_a_key_that_asks_too_often_is_told_its_limits(tmp_path: Path, model_directory: Path) -> None:
    keys = limited(tmp_path, "requests_per_s=0.01 burst=1")
    async with app_for(model_directory, good, api_keys=keys) as app:
        begun_s = time.monotonic()
        answers = [await app.client.get("/v1/models", headers=ALICE) for _ in range(2)]
        passed_s = time.monotonic() - begun_s
    assert [answer.status_code for answer in answers] == [200, 429]
    for answer in answers:
        assert answer.headers["x-ratelimit-limit-requests"] == "1"
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
        assert 100 - passed_s <= duration_s(answer.headers["x-ratelimit-reset-requests"]) <= 100


class Board(Player):
    """A worker that passes gateways' messages about keys on to other gateways."""

    def __init__(self, network: Network) -> None:
        super().__init__(Role.DECODE, good, network)
        self.board = KeyTokensBoard(network.clock)

    def welcome(self, hello: Hello) -> Welcome | HelloRefused:
        self.board.join(hello.peer_id)
        return super().welcome(hello)

    def on_message(self, peer_id: str, role: Role, message: Message) -> None:
        assert isinstance(message, KeyTokens)
        self.board.take(peer_id, message, partial(self.server.send, Role.GATEWAY))


async def test_two_gateways_count_a_keys_tokens_together(tmp_path: Path) -> None:
    """Two gateways exchange a key's used tokens through a worker, over real sockets. A third one that starts later knows them."""
    path, network = Path(limited(tmp_path, "tokens_per_day=1000")), Network.open()
    worker = Board(network)
    worker.address = await worker.server.start()
    pools: list[WorkerPool] = []
    tasks: list[asyncio.Task[None]] = []

    async def start(name: str) -> KeyUse:
        metrics = GatewayMetrics(CollectorRegistry()).of_model("tiny")
        pool = WorkerPool(name, metrics, LINKS, Network.open(), needs_prefill_workers=False)
        pools.append(pool)
        pool.update(static_workers([], [worker.address]))
        await until(pool, lambda: all(one.is_usable for one in pool.workers))
        keys = ApiKeys(path, time.monotonic)
        tasks.append(asyncio.create_task(exchange(keys, [pool])))
        return keys.enter("alice")

    async def hears(use: KeyUse, num_left: int) -> None:
        async with asyncio.timeout(20):
            while (left := use.budget.left(use.limits.tokens, time.monotonic())) is None or left.num_tokens != num_left:
                await asyncio.sleep(0.005)  # polls for a state, bounded by the timeout above

    try:
        first, second = await start("first"), await start("second")
        first.budget.reserve(first.limits.tokens, 700, 700, time.monotonic())
        await hears(second, 300)
        first.budget.settle(700, 400, time.monotonic())
        await hears(second, 600)
        second.budget.reserve(second.limits.tokens, 100, 100, time.monotonic())
        await hears(first, 500)
        await hears(await start("third"), 500)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for pool in pools:
            await pool.stop()
        await worker.server.stop()
        await asyncio.to_thread(network.close)
