"""The process: its signals, its port."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from kvrelay.common.errors import ModelError, SettingsError
from kvrelay.gateway.main import serve
from kvrelay.gateway.settings import DiscoverySettings, GatewaySettings, RelaySettings

from .certificates import trusting, write_pair

PROGRAM = """
import resource, sys
from kvrelay.common.settings import build
from kvrelay.gateway.main import serve
from kvrelay.gateway.settings import GatewaySettings
model, num_files, *more = sys.argv[1:]
if num_files:
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(num_files), int(num_files)))
sys.exit(serve(build(GatewaySettings, {"model": model, "port": 0} | dict(one.split("=") for one in more))))
"""


GET = b"GET /health/live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


@dataclass
class Gateway:
    """A gateway's process, and the lines that it logged before it listened."""

    process: subprocess.Popen[str]
    began: str
    port: int

    def ends_well(self, number: signal.Signals = signal.SIGTERM) -> str:
        """Send a signal and check that the process ends without an error. Returns its whole log."""
        assert self.process.stderr is not None
        self.process.send_signal(number)
        code = self.process.wait(timeout=20)
        log = self.began + self.process.stderr.read()
        assert code == 0, log
        assert "gateway: draining for at most 30 s" in log
        assert "gateway: stopped" in log
        assert "Traceback" not in log
        return log


@contextmanager
def gateway(model: Path, *options: str, num_files: str = "") -> Iterator[Gateway]:
    command = [sys.executable, "-P", "-c", PROGRAM, str(model), num_files, *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        began = ""
        try:
            while (match := re.search(r"gateway: https?://\S+:(\d+)", began)) is None:
                line = process.stderr.readline()
                assert line, began
                began += line
            yield Gateway(process, began, int(match[1]))
        finally:
            process.kill()


def test_who_looks_on_does_not_keep_a_gateway_that_ends(model_directory: Path) -> None:
    with gateway(model_directory) as running, _connected(running.port) as connection:
        connection.sendall(b"GET /debug/live HTTP/1.1\r\nhost: x\r\n\r\n")
        said = b""
        while b"event: roster" not in said:  # the head may come alone
            part = connection.recv(2**16)
            assert part, said
            said += part
        running.ends_well()  # waits less than the 30 s after which requests are cancelled


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_good_end(model_directory: Path, number: signal.Signals) -> None:
    with gateway(model_directory) as running:
        with _connected(running.port) as connection:  # an answer shows that the signal handlers are set
            connection.sendall(GET)
            assert b"200 OK" in connection.recv(1000)
        running.ends_well(number)


def test_over_tls_it_starts_answers_probes_and_stops(model_directory: Path, tmp_path: Path) -> None:
    cert, key = write_pair(tmp_path, "gateway")
    with gateway(model_directory, f"tls-cert={cert}", f"tls-key={key}") as running:
        with _connected(running.port) as plain:
            plain.sendall(GET)
            assert b"HTTP" not in plain.recv(1000)
        with trusting(cert).wrap_socket(_connected(running.port), server_hostname="localhost") as connection:
            connection.sendall(GET)
            assert b"200 OK" in connection.recv(1000)
        assert "gateway: https://127.0.0.1:" in running.ends_well()


def test_connections_that_do_not_fit_the_descriptors_are_not_promised(model_directory: Path) -> None:
    """With a limit of 400 files there is room for 144 clients. The 145th gets a 503, and the first is still served."""
    with gateway(model_directory, num_files="400") as running, ExitStack() as held:
        assert "--max-connections is 10000" in running.began
        assert "may open 400 files; 144 connections are served" in running.began
        connections = [held.enter_context(_connected(running.port)) for _ in range(145)]
        assert connections[-1].recv(1000).startswith(b"HTTP/1.1 503 ")
        connections[0].sendall(GET)
        assert connections[0].recv(1000).startswith(b"HTTP/1.1 200 ")
        running.ends_well()


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
    on = partial(GatewaySettings, relay=RelaySettings(), workers=DiscoverySettings(), model=(str(model_directory),))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"cannot listen on 127.0.0.1:{port}.*choose another port with --port"):
            serve(on(port=port))
        with pytest.raises(SettingsError, match=r"cannot listen on 192\.0\.2\.1:.* with --host"):
            serve(on(port=port, host="192.0.2.1"))


@pytest.mark.usefixtures("_own_logs")
def test_a_model_without_tokenizer_is_named_and_the_port_given_back(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        serve(GatewaySettings(relay=RelaySettings(), workers=DiscoverySettings(), model=(str(tmp_path),), port=0))
