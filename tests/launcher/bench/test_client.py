"""The streaming client against a real server on a socket."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable

import pytest

from kvrelay.common.errors import SettingsError
from kvrelay.launcher.bench.client import Answer as ClientAnswer
from kvrelay.launcher.bench.client import EventSplitter, StreamingClient
from kvrelay.launcher.bench.http_stream import ServerAddress
from kvrelay.launcher.bench.records import TtftParts
from tests.launcher.bench.stub_server import Answer, Request, StubServer, as_asked, completion, event
from tests.ports import reserved_port


@pytest.fixture
def server(own_server: StubServer) -> StubServer:
    return own_server


async def ask(
    server: StubServer, num: int = 1, *, api: str = "completions", timeout_s: float = 20.0, exact: int | None = None
) -> list[ClientAnswer]:
    """Send ``num`` requests, one after another."""
    ticks = itertools.count()

    def clock() -> float:
        return float(next(ticks))

    client = StreamingClient(server.url, api, timeout_s=timeout_s, clock=clock)
    prompts = {"completions": {"prompt": [1, 2]}, "text": {"prompt": "x y"}, "chat": {"messages": [{"content": "x"}]}}
    body = {"max_tokens": 3, **prompts[api]}
    try:
        return [await client.ask(json.dumps(body).encode(), exact_tokens=exact) for _ in range(num)]
    finally:
        await client.close()


@pytest.mark.parametrize("api", ["completions", "text", "chat"])
async def test_every_chunk_with_content_is_noted(server: StubServer, api: str) -> None:
    (answer,) = await ask(server, api=api, exact=3)
    assert (answer.error, answer.output_tokens, len(answer.chunk_s)) == (None, 3, 3)
    assert answer.prompt_tokens == (1 if api == "chat" else 2)
    assert answer.sent_s < answer.chunk_s[0] <= answer.chunk_s[-1] <= answer.finished_s
    assert server.requests[0].path == ("/v1/chat/completions" if api == "chat" else "/v1/completions")


async def test_a_token_without_text_counts_and_the_closing_chunks_do_not(server: StubServer) -> None:
    server.answer = lambda _: Answer(completion([" a", "", "b"], usage=(2, 3)))
    (answer,) = await ask(server, exact=3)
    assert (len(answer.chunk_s), answer.finish_reason, answer.error) == (3, "length", None)


async def test_the_parts_of_ttft_come_from_the_usage_chunk(server: StubServer) -> None:
    parts = {"queue_s": 0.5, "transfer_s": None, "new_part_s": 1, "ttft_s": 0.75}
    server.answer = lambda _: Answer(completion(["a"], usage=(2, 1), kvrelay=parts))
    (answer,) = await ask(server)
    assert answer.parts == TtftParts(queue_s=0.5, ttft_s=0.75)


async def test_events_may_be_cut_anywhere(server: StubServer) -> None:
    whole = b": ping\r\n\r\nevent: x\r\n" + b"".join(completion(["ä", "b"], usage=(2, 2))).replace(b"\n", b"\r\n")
    for size in (1, 7, len(whole)):
        pieces = [whole[start : start + size] for start in range(0, len(whole), size)]
        server.answer = lambda _, pieces=pieces: Answer(pieces)  # type: ignore[misc]
        (answer,) = await ask(server, exact=2)
        assert (answer.error, len(answer.chunk_s)) == (None, 2), size


def test_events_of_several_lines_are_joined() -> None:
    splitter = EventSplitter()
    assert list(splitter.feed(b"data: a\ndata:b\n\ndata: c\n")) == [b"a\nb"]
    assert list(splitter.feed(b"\ndata: d\n\n")) == [b"c", b"d"]


def cut(_: Request) -> Answer:
    return Answer(completion(["a", "b"])[:2], is_cut=True)


def refused(_: Request) -> Answer:
    return Answer([b'{"error": {"message": "no room", "code": "unavailable"}}'], status=503)


def ended_by_itself(_: Request) -> Answer:
    """An answer with the finish reason "stop" and without usage."""
    return Answer([event({"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}), event(b"[DONE]")])


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        (refused, "http 503", "no room"),
        (lambda _: Answer([b'{"detail": "Not Found"}'], status=404), "http 404", "Not Found"),
        (lambda _: Answer([b"x" * 1000], status=500), "http 500", "x" * 200),
        (lambda _: Answer([b'{"error": "no'], status=503, is_cut=True), "http 503", '{"error": "no'),
        (lambda _: Answer([], status=503, is_cut=True), "http 503", "the server closed the connection"),
        (cut, "broken stream", "the server closed the connection"),
        (lambda _: Answer(completion(["a"])[:1]), "broken stream", "without [DONE]"),
        (lambda _: Answer([b"{}"]), "broken stream", "without [DONE]"),
        (lambda _: Answer([event(b"{no json")]), "broken stream", "a chunk is not what it should be"),
        (
            lambda _: Answer([event({"error": {"message": "worker died"}}), event(b"[DONE]")]),
            "broken stream",
            "worker died",
        ),
        (
            lambda _: Answer(completion(["a"], usage=(2, 1))),
            "short answer",
            "1 tokens instead of 3 (finish reason: length)",
        ),
        (lambda _: Answer(completion([])), "short answer", "0 chunks instead of 3 (finish reason: length)"),
        (ended_by_itself, "short answer", "1 chunks instead of 3 (finish reason: stop)"),
    ],
)
async def test_what_fails_has_a_kind_and_a_text(
    server: StubServer, answer: Callable[[Request], Answer], kind: str, text: str
) -> None:
    server.answer = answer
    (got,) = await ask(server, exact=3)
    assert got.error == kind
    assert got.error_text is not None
    assert text in got.error_text
    assert len(got.error_text) <= 200
    assert got.finished_s > got.sent_s


async def test_without_a_known_length_a_shorter_answer_is_fine(server: StubServer) -> None:
    server.answer = lambda _: Answer(completion(["a"], usage=(2, 1)))
    (answer,) = await ask(server)
    assert (answer.error, answer.output_tokens) == (None, 1)


async def test_without_usage_fewer_chunks_than_tokens_may_be_whole(server: StubServer) -> None:
    server.answer = lambda _: Answer(completion(["abc"]))
    (answer,) = await ask(server, exact=3)
    assert (answer.error, answer.output_tokens, len(answer.chunk_s)) == (None, None, 1)


async def test_an_answer_has_ended_when_its_body_has(server: StubServer) -> None:
    """``finished_s`` is at the last chunk, ``ended_s`` at the end of the body. A closed loop sends its next request
    after ``ended_s``."""
    (answer,) = await ask(server)
    assert answer.chunk_s[-1] <= answer.finished_s < answer.ended_s


async def test_an_answer_that_does_not_end_times_out(server: StubServer) -> None:
    never = asyncio.Event()
    server.answer = lambda _: Answer(completion(["a", "b"]), wait=lambda: wait_for(never))
    (answer,) = await ask(server, timeout_s=1.5)  # long enough for the first two chunks
    assert (answer.error, answer.error_text) == ("timeout", "no complete answer after 1.5 s")
    assert len(answer.chunk_s) == 2


async def wait_for(event_: asyncio.Event) -> None:
    await event_.wait()


async def test_nobody_listens() -> None:
    with reserved_port() as port:
        (answer,) = await ask(StubServer(url=f"http://127.0.0.1:{port}"))
    assert answer.error == "connection"
    assert answer.chunk_s == []


async def test_connections_are_used_again_also_after_errors(server: StubServer) -> None:
    def every_second(request: Request) -> Answer:
        return as_asked(request) if len(server.requests) % 2 == 0 else refused(request)

    server.answer = every_second
    got = await ask(server, 6)
    assert [answer.error for answer in got] == ["http 503", None] * 3
    assert server.num_connections == 1


async def test_cancelling_closes_the_connection(server: StubServer) -> None:
    left, never = asyncio.Event(), asyncio.Event()

    async def until_left() -> None:
        left.set()
        await never.wait()

    server.answer = lambda _: Answer(completion(["a"]), wait=until_left)
    task = asyncio.create_task(ask(server))
    await left.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://host:8000/v1/", ("host", 8000, "", "http://host:8000")),
        ("host:81", ("host", 81, "", "http://host:81")),
        ("https://host/models/a", ("host", 443, "/models/a", "https://host/models/a")),
        ("http://[::1]:9/", ("::1", 9, "", "http://[::1]:9")),
    ],
)
def test_urls(url: str, address: tuple[str, int, str, str]) -> None:
    got = ServerAddress(url)
    assert (got.host, got.port, got.base_path, got.url) == address


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(SettingsError, match="--url is"):
        ServerAddress(url)
