"""Fetches the images that requests name by URL, from listed hosts only.

A host gets the URL, and nothing of the client: no header, no cookie, no address. Proxy variables, ``.netrc`` and cookies of hosts
do not count. No log line, error or metric holds a path or a query, as these may be signatures.

Lives on the gateway's asyncio loop. aiohttp is imported only if hosts are listed.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from kvrelay import __version__
from kvrelay.common.clock import Clock
from kvrelay.common.logs import RareWarnings
from kvrelay.gateway.chat.images import ImageLink
from kvrelay.gateway.errors import ImageHostError, InvalidRequestError, OverloadedError, RequestTimeoutError
from kvrelay.gateway.image_hosts import ImageHosts, WebAddress
from kvrelay.gateway.metrics import GatewayMetrics

if TYPE_CHECKING:
    import aiohttp

logger = logging.getLogger(__name__)

FETCH_S = 10.0  # for all images of a request
MAX_FETCHES = 256  # at a time, of all requests
MAX_REQUESTS = 256  # that fetch or wait for it; one more is refused
MAX_REQUESTS_PER_HOST = MAX_REQUESTS // 2  # so that a slow host leaves room for others
MAX_REDIRECTS = 3  # of one image

_MAX_PER_HOST = MAX_FETCHES // 8  # so that several slow hosts leave room for others
_MAX_PER_REQUEST = 8
_REDIRECTS = (301, 302, 303, 307, 308)
_PASSING = (408, 425, 429)  # answers below 500 that are not about the request
_INSTEAD = "or send the image itself, as a data: URL"


class Outcome(StrEnum):
    """The label ``outcome`` of ``kvrelay_image_fetch_seconds``."""

    FETCHED = "fetched"
    REFUSED = "refused"
    HOST_FAILED = "host_failed"
    LATE = "late"
    GIVEN_UP = "given_up"


@dataclass(slots=True)
class _Fetching:
    """The images of one request."""

    max_nbytes: int  # of all together
    until_s: float  # on the loop's clock
    is_clients_time: bool  # whether the client asked for that moment
    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MAX_PER_REQUEST))
    num_bytes: int = 0  # that have come

    def count(self, num_bytes: int, param: str) -> None:
        """Note that so many have come. Raises InvalidRequestError if they are too many."""
        self.require(num_bytes, param)
        self.num_bytes += num_bytes

    def require(self, num_bytes: int, param: str) -> None:
        """Raises InvalidRequestError if ``num_bytes`` more would be too many."""
        if self.num_bytes + num_bytes > self.max_nbytes:
            raise InvalidRequestError(
                f"{param}: the images that this request names by URL have more than {self.max_nbytes} bytes, which are left for "
                "them: make them smaller, or leave some out",
                param=param,
            )


class ImageFetcher:
    """Fetches images from the ``hosts``. Use it inside ``running``."""

    def __init__(self, hosts: ImageHosts, metrics: GatewayMetrics, clock: Clock) -> None:
        self._hosts = hosts
        self._metrics = metrics
        self._clock = clock
        self._warnings = RareWarnings(logger, clock)
        self._session: aiohttp.ClientSession | None = None  # None: no host is listed, or it does not run
        self._num_requests = 0
        self._num_of_site: Counter[str] = Counter()  # requests that name images there

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Opens what fetching needs, and closes it."""
        if not self._hosts:
            yield
            return
        import aiohttp  # noqa: PLC0415

        connector = aiohttp.TCPConnector(
            ssl=ssl.create_default_context(), limit=MAX_FETCHES, limit_per_host=_MAX_PER_HOST
        )
        async with aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": f"kvrelay/{__version__}"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),  # each request has its own deadline
            auto_decompress=False,
            trust_env=False,
        ) as self._session:
            yield
        self._session = None

    def check(self, links: Sequence[ImageLink]) -> None:
        """Raises InvalidRequestError naming an image whose host is not listed."""
        for link in links:
            if not self._hosts.allows(link.address):
                raise self._unlisted(f"{link.param} is at {link.address.site}", link.param)

    async def fetch(self, links: Sequence[ImageLink], max_nbytes: int, timeout_s: float) -> list[bytes]:
        """The files of ``links``, in order. They may have ``max_nbytes`` together. ``timeout_s``: what the client asked for.

        Raises InvalidRequestError naming an image that cannot be had, ImageHostError if a host is down or slow,
        RequestTimeoutError, and OverloadedError. Cancel to fetch no further.
        """
        self.check(links)
        if self._num_requests >= MAX_REQUESTS:
            raise OverloadedError(
                f"this gateway fetches the images of {MAX_REQUESTS} requests already; try again later",
                retry_after_s=1.0,
            )
        sites = {link.address.site for link in links}
        for site in sorted(sites):
            if self._num_of_site[site] >= MAX_REQUESTS_PER_HOST:
                raise OverloadedError(
                    f"this gateway waits for images from {site} for {MAX_REQUESTS_PER_HOST} requests already; try again later, "
                    f"{_INSTEAD}",
                    retry_after_s=1.0,
                )
        until_s = asyncio.get_running_loop().time() + min(FETCH_S, timeout_s)
        fetching = _Fetching(max_nbytes, until_s, is_clients_time=timeout_s < FETCH_S)
        tasks = [asyncio.create_task(self._fetch(link, fetching)) for link in links]
        self._num_requests += 1
        self._num_of_site.update(sites)
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            self._num_requests -= 1
            self._num_of_site -= Counter(sites)  # keeps no site without requests
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch(self, link: ImageLink, fetching: _Fetching) -> bytes:
        begun_s, outcome = self._clock(), Outcome.GIVEN_UP
        try:
            async with asyncio.timeout_at(fetching.until_s), fetching.places:
                data = await self._follow(link, fetching)
            outcome = Outcome.FETCHED
            return data
        except TimeoutError:
            outcome = Outcome.LATE
            raise self._late(link, fetching) from None
        except ImageHostError:
            outcome = Outcome.HOST_FAILED
            raise
        except InvalidRequestError:
            outcome = Outcome.REFUSED
            raise
        finally:
            self._metrics.image_fetch_s.labels(outcome).observe(self._clock() - begun_s)

    async def _follow(self, link: ImageLink, fetching: _Fetching) -> bytes:
        """The file, wherever its host redirects to."""
        import aiohttp  # noqa: PLC0415
        import yarl  # noqa: PLC0415

        assert self._session is not None, "images are fetched while the fetcher runs"
        address = link.address
        try:
            for _ in range(MAX_REDIRECTS + 1):
                url = yarl.URL(address.url, encoded=True)  # to the letter, or signatures would not fit
                async with self._session.get(url, allow_redirects=False) as answer:
                    if answer.status not in _REDIRECTS:
                        return await self._body(answer, address, link.param, fetching)
                    address = self._redirected(address, answer.headers.get("Location", ""), link.param)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error, TimeoutError):
                raise
            # Its text may have the URL, or addresses of this network.
            what = "cannot be reached, or ends the connection"
            raise self._failed(address, what, link.param, cause=f" ({type(error).__name__})") from None
        raise InvalidRequestError(
            f"{link.param}: {link.address.site} redirects more than {MAX_REDIRECTS} times; name the place itself",
            param=link.param,
        )

    async def _body(
        self, answer: aiohttp.ClientResponse, address: WebAddress, param: str, fetching: _Fetching
    ) -> bytes:
        if answer.status >= 500 or answer.status in _PASSING:
            raise self._failed(address, f"answers with status {answer.status}", param)
        if answer.status != 200:
            raise InvalidRequestError(
                f"{param}: {address.site} answers with status {answer.status}; check the URL, {_INSTEAD}", param=param
            )
        if answer.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
            raise InvalidRequestError(
                f"{param}: {address.site} sends the file compressed (Content-Encoding), and was asked for it as it is; store it "
                f"without, {_INSTEAD}",
                param=param,
            )
        fetching.require(answer.content_length or 0, param)
        data = bytearray()
        async for chunk in answer.content.iter_any():
            fetching.count(len(chunk), param)
            data += chunk
        return bytes(data)

    def _redirected(self, address: WebAddress, location: str, param: str) -> WebAddress:
        try:
            to = address.redirected(location)
        except ValueError as error:
            raise InvalidRequestError(
                f"{param}: {address.site} redirects to a URL that is not fetched: {error}; name another one, {_INSTEAD}",
                param=param,
            ) from None
        if not self._hosts.allows(to):
            raise self._unlisted(f"{param}: {address.site} redirects to {to.site}", param)
        return to

    def _unlisted(self, what: str, param: str) -> InvalidRequestError:
        why = "" if self._hosts else "; it is empty, so this deployment fetches nothing"
        return InvalidRequestError(
            f"{what}, which is not in --image-hosts of the gateway{why}: ask its operator, {_INSTEAD}", param=param
        )

    def _late(self, link: ImageLink, fetching: _Fetching) -> ImageHostError | RequestTimeoutError:
        if fetching.is_clients_time:
            return RequestTimeoutError(
                f"{link.param} did not come from {link.address.site} within the request's own timeout; give it more time",
                param=link.param,
            )
        return self._failed(link.address, f"does not send it within {FETCH_S:g} s", link.param)

    def _failed(self, address: WebAddress, what: str, param: str, *, cause: str = "") -> ImageHostError:
        self._warnings.warn(f"an image could not be fetched: {address.site} {what}{cause}", "image_host")
        return ImageHostError(f"{param}: {address.site} {what}; try again later, {_INSTEAD}", param=param)
