"""Images are fetched from listed hosts only, within bounds, and what a URL holds beside its host stays secret."""

from __future__ import annotations

import asyncio
import gzip
import logging
import math
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvrelay.gateway.chat import image_fetch
from kvrelay.gateway.chat.image_fetch import ImageFetcher
from kvrelay.gateway.chat.images import ImageLink
from kvrelay.gateway.errors import (
    ApiError,
    ImageHostError,
    InvalidRequestError,
    OverloadedError,
    RequestTimeoutError,
)
from kvrelay.gateway.image_hosts import ImageHosts, WebAddress
from kvrelay.gateway.metrics import GatewayMetrics
from tests.ipv6 import needs_ipv6
from tests.ports import reserved_port

from ..certificates import write_pair
from ..web_host import FETCH_S, Deadlines, Serve, WebHost, answer, beginning, endless, redirect, silence, web_host

CAT, DOG = b"a cat" * 100, b"a dog" * 77
SECRET = "s3cret"


class Fetching:
    """A fetcher that runs, and its metrics."""

    def __init__(self, entries: tuple[str, ...]) -> None:
        self.metrics = GatewayMetrics(CollectorRegistry())
        self.fetcher = ImageFetcher(ImageHosts(entries), self.metrics, time.monotonic)

    async def get(self, *urls: str, nbytes: int = 10_000, timeout_s: float = math.inf) -> list[bytes]:
        links = [ImageLink(WebAddress.of(url), f"image[{index}]") for index, url in enumerate(urls)]
        async with asyncio.timeout(30):
            return await self.fetcher.fetch(links, nbytes, timeout_s)

    async def refusal(self, kind: type[ApiError], *urls: str, **more: Any) -> str:
        with pytest.raises(kind) as caught:
            await self.get(*urls, **more)
        assert type(caught.value) is kind
        assert caught.value.param == f"image[{len(urls) - 1}]"
        assert SECRET not in str(caught.value)
        assert caught.value.__cause__ is None, "its text may have the URL"
        return str(caught.value)

    def count(self, outcome: str) -> float:
        labels = {"outcome": outcome}
        return self.metrics.registry.get_sample_value("kvrelay_image_fetch_seconds_count", labels) or 0


@asynccontextmanager
async def fetching(*entries: str) -> AsyncIterator[Fetching]:
    found = Fetching(entries)
    async with found.fetcher.running():
        yield found


@pytest.fixture
async def host() -> AsyncIterator[WebHost]:
    async with web_host() as found:
        found.files |= {"/cat": CAT, "/dog": DOG}
        yield found


@pytest.fixture
async def listed(host: WebHost) -> AsyncIterator[Fetching]:
    async with fetching(host.entry) as found:
        yield found


async def test_files_come_in_the_order_of_their_links(host: WebHost, listed: Fetching) -> None:
    assert await listed.get(host.url("/cat"), host.url("/dog"), host.url("/cat")) == [CAT, DOG, CAT]
    assert listed.count("fetched") == 3


async def test_a_host_gets_the_url_to_the_letter_and_nothing_of_anybody(host: WebHost, listed: Fetching) -> None:
    host.files["/a/../b%2fc;d"] = answer(200, CAT, "Set-Cookie: who=me; Path=/")
    url = host.url("/a/../b%2fc;d?X-Sig=a%2Bb+c%7e~&e=%20#x", "LOCALHOST.")
    assert await listed.get(url) == await listed.get(url) == [CAT]
    assert host.heads[0] == host.heads[1], "a cookie came back"
    first, *headers = host.heads[0].strip().split("\r\n")
    assert first == "GET /a/../b%2fc;d?X-Sig=a%2Bb+c%7e~&e=%20 HTTP/1.1"
    told = {name.lower(): value for name, value in (line.split(": ", 1) for line in headers)}
    assert told.keys() == {"host", "accept", "accept-encoding", "user-agent"}
    assert (told["host"], told["accept-encoding"]) == (f"localhost:{host.port}", "identity")


async def test_other_hosts_are_not_asked(host: WebHost, listed: Fetching) -> None:
    for url in (host.url("/cat", "127.0.0.1"), f"https://localhost:{host.port}/", "http://localhost/"):
        with pytest.raises(InvalidRequestError) as caught:
            await listed.get(host.url("/cat"), f"{url}?{SECRET}")
        assert caught.value.param == "image[1]"
        site = url.removesuffix("/cat").removesuffix("/")
        assert f"image[1] is at {site}, which is not in --image-hosts of the gateway: ask" in str(caught.value)
        assert SECRET not in str(caught.value)
    assert host.heads == []
    async with fetching() as nothing:
        message = await nothing.refusal(InvalidRequestError, host.url(f"/cat?{SECRET}"))
        assert "--image-hosts of the gateway; it is empty, so this deployment fetches nothing" in message
    assert host.heads == []


async def test_redirections_lead_to_listed_hosts_only(host: WebHost) -> None:
    async with web_host() as other, fetching(host.entry, f"http://127.0.0.1:{other.port}") as listed:
        other.files["/dog"] = DOG
        for status in (301, 302, 303, 307, 308):
            host.files["/there"] = redirect(other.url("/dog", "127.0.0.1"), status)
            host.files["/here"] = redirect("/there?x", status)
            assert await listed.get(host.url("/here")) == [DOG]
        assert len(other.heads) == 5
        for location in (other.url(f"/dog?{SECRET}"), f"http://localhost/?{SECRET}"):
            host.files["/there"] = redirect(location)
            message = await listed.refusal(InvalidRequestError, host.url("/there"))
            assert f"redirects to {location.partition('/dog')[0].partition('/?')[0]}, which is not in" in message
        for location in (
            f"http://{SECRET}@127.0.0.1:{other.port}/dog",
            f"file:///{SECRET}",
            f"http://[{SECRET}",
            "\u00e9",
        ):
            host.files["/there"] = redirect(location)
            message = await listed.refusal(InvalidRequestError, host.url("/there"))
            assert "redirects to a URL that is not fetched: it" in message
        assert len(other.heads) == 5


async def test_redirections_are_few(host: WebHost, listed: Fetching) -> None:
    host.files |= {f"/{number}": redirect(f"/{number - 1}") for number in range(1, 5)} | {"/0": CAT}
    assert await listed.get(host.url("/3")) == [CAT]
    num_asked = len(host.heads)
    assert "redirects more than 3 times" in await listed.refusal(InvalidRequestError, host.url("/4"))
    assert len(host.heads) == num_asked + 4
    host.files["/nowhere"] = answer(302)
    await listed.refusal(InvalidRequestError, host.url("/nowhere"))


@pytest.mark.parametrize("status", [204, 206, 304, 400, 401, 403, 404, 410])
async def test_what_a_client_can_mend_is_its_mistake(host: WebHost, listed: Fetching, status: int) -> None:
    host.files["/gone"] = answer(status)
    message = await listed.refusal(InvalidRequestError, host.url("/cat"), host.url(f"/gone?{SECRET}"))
    assert f"image[1]: {host.entry} answers with status {status}; check the URL" in message
    assert listed.count("refused") == 1


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
async def test_what_only_the_host_can_mend_is_the_hosts_failure(host: WebHost, listed: Fetching, status: int) -> None:
    host.files["/gone"] = answer(status)
    message = await listed.refusal(ImageHostError, host.url(f"/gone?{SECRET}"))
    assert f"image[0]: {host.entry} answers with status {status}; try again later" in message
    assert listed.count("host_failed") == 1


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "GZIP, identity"])
async def test_compressed_files_are_refused(host: WebHost, listed: Fetching, coding: str) -> None:
    """They could grow a thousandfold."""
    host.files["/bomb"] = answer(200, gzip.compress(bytes(5_000_000)), f"Content-Encoding: {coding}")
    assert "sends the file compressed" in await listed.refusal(InvalidRequestError, host.url("/bomb"))
    host.files["/plain"] = answer(200, CAT, "Content-Encoding: identity")
    assert await listed.get(host.url("/plain")) == [CAT]


async def test_bytes_are_bounded_together_and_while_they_come(host: WebHost, listed: Fetching) -> None:
    room = len(CAT) + len(DOG)
    assert await listed.get(host.url("/cat"), host.url("/dog"), nbytes=room) == [CAT, DOG]
    for urls in ((host.url("/cat"), host.url("/dog")), (host.url("/cat"), host.url("/cat"), host.url("/dog"))):
        with pytest.raises(InvalidRequestError, match=r"^image.*have more than \d+ bytes, which are left for them"):
            await listed.get(*urls, nbytes=room - 1)
    host.files["/endless"] = endless
    await listed.refusal(InvalidRequestError, host.url("/endless"))
    # What is announced to be too large is not read.
    host.files["/large"] = beginning("Content-Length: 10001")
    await listed.refusal(InvalidRequestError, host.url("/large"))
    async with asyncio.timeout(20):
        await host.left.wait()


SLOW: list[Serve] = [silence, beginning("Content-Length: 99"), beginning("Content-Length: 99", body=b"x")]


@pytest.mark.parametrize("served", SLOW)
async def test_a_slow_host_is_not_waited_for(
    host: WebHost, listed: Fetching, served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.files["/slow"] = Deadlines(monkeypatch).is_late(served)
    message = await listed.refusal(ImageHostError, host.url(f"/slow?{SECRET}"))
    assert f"image[0]: {host.entry} does not send it within {FETCH_S:g} s; try again later" in message
    assert (listed.count("late"), listed.count("fetched")) == (1, 0)
    async with asyncio.timeout(20):
        await host.left.wait()


async def test_redirections_and_images_share_one_deadline(
    host: WebHost, listed: Fetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step takes less than the deadline, and all of them take more."""
    monkeypatch.setattr(image_fetch, "FETCH_S", 0.3)

    def late(serve: Serve) -> Serve:
        async def served(writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(0.2)  # the host takes its time
            await serve(writer)

        return served

    host.files |= {"/a": late(redirect("/b")), "/b": late(answer(200, CAT))}
    await listed.refusal(ImageHostError, host.url("/a"))


async def test_a_client_may_give_it_less_time(host: WebHost, listed: Fetching, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_fetch, "FETCH_S", 1000.0)
    host.files["/slow"] = silence
    message = await listed.refusal(RequestTimeoutError, host.url(f"/slow?{SECRET}"), timeout_s=0.1)
    assert "did not come from" in message


@pytest.mark.parametrize(
    "served",
    [
        b"SSH-2.0-host\r\n",
        b"HTTP/1.1 200 Told\r\nContent-Length: 99\r\n\r\nx",
        b"HTTP/1.1 200 Told\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 Told\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 Told\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n",
        b"",
    ],
)
async def test_a_host_that_breaks_off_has_failed(host: WebHost, listed: Fetching, served: bytes) -> None:
    async def serve(writer: asyncio.StreamWriter) -> None:
        writer.write(served)
        await writer.drain()
        writer.close()

    host.files["/broken"] = serve
    message = await listed.refusal(ImageHostError, host.url(f"/broken?{SECRET}"))
    assert f"image[0]: {host.entry} cannot be reached, or ends the connection; try again later" in message
    assert listed.count("host_failed") == 1


async def test_a_host_that_is_down_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    """The log says why, once a second at most. Neither it nor the error tells an address of this network."""
    with reserved_port() as port:
        entry = f"http://localhost:{port}"
        async with fetching(entry) as listed:
            for _ in range(3):
                assert "127.0.0.1" not in await listed.refusal(ImageHostError, f"{entry}/?{SECRET}")
    [line] = [record.getMessage() for record in caplog.records]
    assert f"{entry} cannot be reached, or ends the connection (ClientConnectorError)" in line


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return write_pair(tmp_path, "images")


@pytest.mark.parametrize(("is_trusted", "name"), [(True, "localhost"), (False, "localhost"), (True, "127.0.0.1")])
async def test_the_system_trusts_a_hosts_certificate_and_it_has_its_name(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, is_trusted: bool, name: str
) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*pair)
    if is_trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(pair[0]))
    async with web_host(tls) as host, fetching(f"{name}:{host.port}") as listed:
        host.files["/cat"] = CAT
        if is_trusted and name == "localhost":
            assert await listed.get(host.url("/cat", name)) == [CAT]
            return
        await listed.refusal(ImageHostError, host.url(f"/cat?{SECRET}", name))
        assert host.heads == []


@needs_ipv6
async def test_an_ipv6_address_is_a_host() -> None:
    with reserved_port("::1") as port:
        async with fetching(f"http://[::1]:{port}") as listed:
            await listed.refusal(ImageHostError, f"http://[0:0::1]:{port}/")


async def test_neither_a_proxy_nor_a_netrc_counts(
    host: WebHost, listed: Fetching, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine localhost login me password secret\n")
    monkeypatch.setenv("NETRC", str(netrc))
    with reserved_port() as port:
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, f"http://localhost:{port}")
        assert await listed.get(host.url("/cat")) == [CAT]
    assert "authorization" not in host.heads[0].lower()


async def test_a_client_that_leaves_ends_its_fetches(host: WebHost, listed: Fetching) -> None:
    host.files["/slow"] = beginning("Content-Length: 99", body=b"x")
    asking = asyncio.create_task(listed.get(host.url("/slow")))
    await host.is_asked.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    async with asyncio.timeout(20):
        await host.left.wait()
    assert listed.count("given_up") == 1


async def test_an_image_that_fails_ends_the_others(host: WebHost, listed: Fetching) -> None:
    host.files["/slow"] = silence
    await listed.refusal(InvalidRequestError, host.url("/slow"), host.url("/gone"))
    async with asyncio.timeout(20):
        await host.left.wait()
    assert (listed.count("refused"), listed.count("given_up")) == (1, 1)


async def test_fetches_at_a_time_are_bounded(host: WebHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one request, of one host, and of all; and so are requests that wait for that."""
    monkeypatch.setattr(image_fetch, "MAX_REQUESTS", 5)
    held, url = asyncio.Event(), host.url("/held")

    async def hold(writer: asyncio.StreamWriter) -> None:
        await held.wait()
        await answer(200, b"x")(writer)

    host.files["/held"] = hold
    for per_request, per_host, of_all, most in ((2, 99, 99, 10), (99, 4, 99, 4), (99, 99, 3, 3)):
        held.clear()
        host.most_open = 0
        monkeypatch.setattr(image_fetch, "_MAX_PER_REQUEST", per_request)
        monkeypatch.setattr(image_fetch, "_MAX_PER_HOST", per_host)
        monkeypatch.setattr(image_fetch, "MAX_FETCHES", of_all)
        async with fetching(host.entry) as listed:
            requests = [asyncio.create_task(listed.get(*[url] * 6)) for _ in range(5)]
            async with asyncio.timeout(20):
                while host.num_open < most:
                    await asyncio.sleep(0.001)  # polls for a state, bounded by the timeout above
            with pytest.raises(OverloadedError, match="fetches the images of 5 requests already") as caught:
                await listed.get(url)
            assert caught.value.retry_after is not None
            held.set()
            assert await asyncio.gather(*requests) == [[b"x"] * 6] * 5
            assert host.most_open == most
            assert await listed.get(url) == [b"x"]


async def test_a_slow_host_leaves_places_for_others(host: WebHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_fetch, "MAX_REQUESTS_PER_HOST", 2)
    host.files["/slow"] = silence
    async with web_host() as other, fetching(host.entry, other.entry) as listed:
        other.files["/cat"] = answer(200, CAT)
        waiting = [asyncio.create_task(listed.get(host.url("/slow"), host.url("/slow"))) for _ in range(2)]
        await host.is_asked.wait()
        with pytest.raises(OverloadedError, match=r"images from http://localhost:\d+ for 2 requests already"):
            await listed.get(host.url("/cat"))
        assert await listed.get(other.url("/cat")) == [CAT]
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert await listed.get(host.url("/cat")) == [CAT]


async def test_no_log_and_no_metric_has_a_path(
    host: WebHost, listed: Fetching, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    host.files |= {"/away": redirect(f"/cat?{SECRET}"), "/broken": answer(500)}
    await listed.get(host.url(f"/cat?{SECRET}"), host.url("/away"))
    for path in ("broken", "gone"):
        with pytest.raises(ApiError) as caught:
            await listed.get(host.url(f"/{path}?{SECRET}"))
        assert caught.value.__cause__ is None
    assert any("status 500" in record.getMessage() for record in caplog.records)
    for shown in (caplog.text, generate_latest(listed.metrics.registry).decode()):
        assert SECRET not in shown
        assert "/cat" not in shown
