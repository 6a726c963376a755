"""What the tests of `kvrelay bench` share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.launcher.bench.stub_server import StubServer


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("KVRELAY_"):
            monkeypatch.delenv(name)


@pytest.fixture
def server() -> Iterator[StubServer]:
    with StubServer().in_thread() as stub:
        yield stub
