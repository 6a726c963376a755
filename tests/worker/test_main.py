"""What a worker's process refuses before it loads a model."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from kvrelay.common.errors import SettingsError
from kvrelay.common.settings import build
from kvrelay.decode_worker.settings import DecodeSettings
from kvrelay.wire.messages import Role
from kvrelay.worker.main import serve_worker


def never(*_: Any) -> Any:
    raise AssertionError("something is loaded")


@pytest.fixture(autouse=True)
def _own_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test process keeps its log handlers and their level."""
    monkeypatch.setattr("kvrelay.worker.main.configure_logs", lambda *_: None)


def start(**listens_at: str) -> None:
    settings = build(DecodeSettings, {"model": "/nowhere"})
    given = {f"--{name.replace('_', '-')}": address for name, address in listens_at.items()}
    serve_worker(Role.DECODE, settings, given, never, never)


def test_a_taken_address_is_told_before_the_model_loads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SettingsError, match=rf"^--data-address: cannot listen on {at} \(Address already in use\)"):
            start(address="tcp://127.0.0.1:0", data_address=at)


@pytest.mark.parametrize(
    "address", ["nonsense", "127.0.0.1:7100", "tcp://127.0.0.1", "tcp://127.0.0.1:70000", "tcp://", "tcp://:7100"]
)
def test_what_is_no_address_is_told_before_the_model_loads(address: str) -> None:
    with pytest.raises(SettingsError, match=r"^--address: cannot listen on .*; write tcp://HOST:PORT"):
        start(address=address)
