"""The process: its signals, its port."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvrelay.common.errors import ModelError, SettingsError
from kvrelay.gateway.main import serve
from kvrelay.gateway.settings import DiscoverySettings, GatewaySettings, RelaySettings

PROGRAM = """
import sys
from kvrelay.gateway.main import serve
from kvrelay.gateway.settings import DiscoverySettings, GatewaySettings, RelaySettings
sys.exit(serve(GatewaySettings(relay=RelaySettings(), workers=DiscoverySettings(), model=sys.argv[1], port=0)))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_good_end(model_directory: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM, str(model_directory)], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            port = int(process.stderr.readline().rsplit(":", 1)[1])
            with _connected(port) as connection:  # then the signals are taken over
                connection.sendall(b"GET /health/live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                assert b"200 OK" in connection.recv(1000)
            process.send_signal(number)
            code = process.wait(timeout=20)
        finally:
            process.kill()
        log = process.stderr.read()
        assert code == 0, log
        assert "gateway: stopped" in log
        assert "Traceback" not in log


def _connected(port: int) -> socket.socket:
    deadline_s = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=20)
        except ConnectionRefusedError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)  # polls for a state, bounded by the deadline above


@pytest.fixture
def _own_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test process keeps its log handlers."""
    monkeypatch.setattr("kvrelay.gateway.main.configure_logs", lambda *_: None)


@pytest.mark.usefixtures("_own_logs")
def test_a_taken_port_is_named(model_directory: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"cannot listen on 127.0.0.1:{port}.*choose another port"):
            serve(
                GatewaySettings(
                    relay=RelaySettings(), workers=DiscoverySettings(), model=str(model_directory), port=port
                )
            )


@pytest.mark.usefixtures("_own_logs")
def test_a_model_without_tokenizer_is_named_and_the_port_given_back(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        serve(GatewaySettings(relay=RelaySettings(), workers=DiscoverySettings(), model=str(tmp_path), port=0))
