"""What the tests of `kvrelay bench` share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.launcher.bench.stub_server import StubServer


@pytest.fixture
async def own_server() -> AsyncIterator[StubServer]:
    """In the test's own loop."""
    async with StubServer().running() as stub:
        yield stub


@pytest.fixture
def server() -> Iterator[StubServer]:
    """In a thread."""
    with StubServer().in_thread() as stub:
        yield stub
