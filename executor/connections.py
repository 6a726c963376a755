"""HTTP/1.1 connections to one address, as many as there are requests under way.

httpcore looks at every connection of its pool whenever a request begins or ends, with system calls for each that is idle: of 600
connections that is milliseconds for every request. So a pool has a few connections here, and there are as many pools as are needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import httpx

from kvrelay.common.settings import setting

KEPT_S = 30.0  # how long a connection waits for the next request; gateways keep theirs longer
_POOL_SIZE = 16
# A connection whose other machine is gone is ended after some 60 s; a gateway that computes for long says nothing meanwhile.
_KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """Of the way to a gateway."""

    max_connections: int = setting(
        1000, "requests on their way to the gateway at a time; more wait in this process", minimum=1
    )
    connect_timeout_s: float = setting(10.0, "how long a connection may take", unit="s", minimum=0.1)


@dataclass(slots=True)
class _Pool:
    client: httpx.AsyncClient
    num_used: int = 0


class Connections:
    """Used from one event loop; ``aclose`` ends all of them."""

    def __init__(self, url: str, headers: Mapping[str, str], settings: RemoteSettings) -> None:
        """``headers``: of every request."""
        self._url = url
        self._headers = headers
        self._settings = settings
        self._places = asyncio.Semaphore(settings.max_connections)
        self._certificates = httpx.create_ssl_context()  # tens of milliseconds, and the same for all
        self._pools: list[_Pool] = []

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[httpx.AsyncClient]:
        """A client with a connection for one request at a time, for as long as the context; waits for one if all are in use."""
        async with self._places:
            pool = next((pool for pool in self._pools if pool.num_used < _POOL_SIZE), None) or self._another()
            pool.num_used += 1
            try:
                yield pool.client
            finally:
                pool.num_used -= 1

    async def aclose(self) -> None:
        """End what is open; what is under way there fails."""
        for pool in self._pools:
            await pool.client.aclose()

    def _another(self) -> _Pool:
        limits = httpx.Limits(max_connections=_POOL_SIZE, keepalive_expiry=KEPT_S)
        transport = httpx.AsyncHTTPTransport(verify=self._certificates, limits=limits, socket_options=_KEEPALIVE)
        timeout = httpx.Timeout(None, connect=self._settings.connect_timeout_s)
        client = httpx.AsyncClient(base_url=self._url, headers=self._headers, transport=transport, timeout=timeout)
        self._pools.append(_Pool(client))
        return self._pools[-1]
