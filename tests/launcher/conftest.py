"""Fake components: real processes that answer ``/health/ready`` and behave as the test says."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvrelay.launcher.local.ports import free_ports
from kvrelay.launcher.local.process import ComponentSpec

# Arguments: port, behaviour, name, folder. The files "started" and "stopped" in the folder list names in order.
# While there is a file "unready" in it, no component is ready.
FAKE_COMPONENT = """
import http.server, os, pathlib, signal, sys, threading

port, behaviour, name, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3], pathlib.Path(sys.argv[4])

def note(file):
    with (folder / file).open("a") as lines:
        lines.write(name + "\\n")

def num_starts():
    return (folder / "started").read_text().split().count(name)

note("started")
print(f"{name} runs as {os.getpid()}", flush=True)
if behaviour == "dies at start" or behaviour == "dies at restart" and num_starts() > 1:
    print("the reason: no such weights", file=sys.stderr)
    sys.exit(3)

has_broken_off = threading.Event()

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/die":
            print("told to die", flush=True)
            os._exit(7)
        self.send_response(503 if behaviour == "never ready" or (folder / "unready").exists() else 200)
        if behaviour == "breaks off at first" and not has_broken_off.is_set():
            has_broken_off.set()
            self.send_header("Content-Length", "10")
            self.end_headers()
            self.wfile.write(b"ok\\n")
            return
        self.end_headers()
        if behaviour == "dies when ready":
            os._exit(3)

    def log_message(self, *_):
        pass

def stop(*_):
    note("stopped")
    if behaviour != "stubborn":
        os._exit(0)

signal.signal(signal.SIGTERM, stop)
http.server.ThreadingHTTPServer.allow_reuse_address = True
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

MakeSpec = Callable[..., ComponentSpec]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("KVRELAY_"):
            monkeypatch.delenv(name)


@pytest.fixture
def make_spec(tmp_path: Path) -> MakeSpec:
    """``make_spec(name, behaviour, stop_rank=…, grace_s=…)``: the spec of a fake component."""
    script = tmp_path / "fake_component.py"
    script.write_text(FAKE_COMPONENT)
    ports = iter(free_ports(4))  # all at once, so that they differ: nobody listens yet

    def make(name: str, behaviour: str = "works", stop_rank: int = 0, grace_s: float = 60.0) -> ComponentSpec:
        port = next(ports)
        return ComponentSpec(
            name=name,
            command=(sys.executable, "-I", "-S", str(script), str(port), behaviour, name, str(tmp_path)),
            ready_url=f"http://127.0.0.1:{port}/health/ready",
            stop_rank=stop_rank,
            grace_s=grace_s,
        )

    return make
