"""Fixtures of the tests of `kvrelay bench`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.launcher.bench.stub_server import StubServer


@pytest.fixture
async def own_server() -> AsyncIterator[StubServer]:
    """A stub server in the test's event loop."""
    async with StubServer().running() as stub:
        yield stub


@pytest.fixture
def server() -> Iterator[StubServer]:
    """A stub server in a thread."""
    with StubServer().in_thread() as stub:
        yield stub
