"""``kvrelay top`` against a server that answers like a gateway."""

from __future__ import annotations

import io
import json
import re
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from kvrelay.common.errors import SettingsError
from kvrelay.gateway.desk.figures import Figures
from kvrelay.gateway.desk.snapshot import Known, Load, Roster, State
from kvrelay.gateway.http.sse import sse
from kvrelay.launcher import top
from kvrelay.launcher.errors import AnswerError
from tests.ports import reserved_port

from ..gateway.certificates import write_pair

ROSTER = Roster(
    version="1",
    models=["tiny"],
    workers=[
        Known(address="tcp://a:1", role="prefill", model="tiny", name="pre-0", num_blocks=100, max_running=4),
        Known(address="tcp://b:2", role="decode", model="tiny", problem="no [red]route[/red]\x1b[2J"),
    ],
)
STATE = State(
    at=0.0,
    num_running=3,
    num_queued=2,
    figures=Figures(
        prompt_tokens_per_s=1200, output_tokens_per_s=34, cached=0.25, ttft_s=(0.2, 1.5), itl_s=(0.0123, None),
        parts_s={"prefill": 0.15, "queue": 0.03, "first_step": 0.012, "transfer": 0.004},
    ),
    workers=[Load("up", "closed", 2, 1, 512, 40, 900), Load("down", "open", 0, 0, 0, 0, None)],
    flows=[(0, 1, 77), (-1, 1, 5)],
    pairs=[],
    errors=[(0.0, "request-9", 502, "attempts_failed")],
)  # fmt: skip


@contextmanager
def gateway(
    *events: bytes, certificate: tuple[Path, Path] | None = None, authorization: str | None = "Bearer k"
) -> Iterator[str]:
    """The URL of a server that requires this authorization, if any, and sends ``events``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_let_in = self.headers["Authorization"] == authorization and self.path == "/debug/live"
            self.send_response(200 if is_let_in else 403)
            self.end_headers()
            self.wfile.write(b"".join(events) if is_let_in else json.dumps({"error": {"message": "not you"}}).encode())

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            host = "127.0.0.1" if certificate is None else "localhost"
            yield f"{'http' if certificate is None else 'https'}://{host}:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


SAID = (sse(ROSTER, "roster"), sse(STATE, "state"), sse(STATE, "state"))


def shown(url: str, key: str | None = "k") -> str:
    console = Console(file=io.StringIO(), width=160)
    assert top.run(url, key, console) == 0
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_one_picture_where_there_is_no_terminal() -> None:
    with gateway(*SAID) as url:
        text = shown(url)
    assert "3 running   2 queued   1200 prompt and 34 output tokens/s   25% cached" in text
    parts = "queue 30 + prefill 150; then transfer 4 + first_step 12"
    assert f"first token 200 ms, 95 %: 1500 ({parts})   between tokens 12.3 ms, 99 %: -" in text
    prefill, decode = (next(line for line in text.splitlines() if word in line) for word in ("pre-0", "tcp://b:2"))
    assert prefill.split() == ["pre-0", "prefill", "up", "2/4", "1", "512", "40%", "900", "77"]
    assert "down, breaker open (no [red]route[/red]" in decode
    assert "\x1b" not in text
    assert "502  attempts_failed  request-9" in text


def test_no_title_is_cut_off_on_a_narrow_terminal() -> None:
    console = Console(file=io.StringIO(), width=80)
    roster = msgspec.structs.replace(
        ROSTER, workers=[msgspec.structs.replace(one, problem="") for one in ROSTER.workers]
    )
    state = msgspec.structs.replace(STATE, workers=[Load("up", "closed", 2, 1, 512, 40, 900)] * 2)
    console.print(top.render(msgspec.to_builtins(roster), msgspec.to_builtins(state)))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "…" not in text
    above, below = (line.split() for line in text.splitlines() if line.endswith(("handed", "over/s")))
    assert above == ["tokens", "KV", "in", "prompt", "handed"]
    assert below == ["worker", "role", "state", "running", "waiting", "waiting", "use", "tokens/s", "over/s"]


def test_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = write_pair(tmp_path, "gateway")
    with gateway(*SAID, certificate=(cert, key)) as url:
        with pytest.raises(AnswerError, match=r"does not answer .*certificate.*; SSL_CERT_FILE=ca\.crt names"):
            shown(url)
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        assert "pre-0" in shown(url)


def test_what_is_wrong_is_said() -> None:
    with gateway(b"event: state\ndata: 7\n\n") as url:
        with pytest.raises(
            AnswerError, match="403: not you; set KVRELAY_API_KEY, or --api-key, to an operator's API key"
        ):
            shown(url, None)
        with pytest.raises(AnswerError, match="no gateway of this version"):
            shown(url)
    with reserved_port() as port, pytest.raises(AnswerError, match=r"does not answer .*; start a gateway there"):
        shown(f"http://127.0.0.1:{port}/")
    with pytest.raises(SettingsError, match="write http://HOST:PORT"):
        shown("ftp://x")
    with pytest.raises(SettingsError, match=r"URL is 'http://\[::1': Invalid IPv6 URL"):
        shown("http://[::1")


def test_on_a_terminal_it_goes_on_while_the_gateway_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = iter(range(2))

    def sleep(_: float) -> None:
        if next(pauses, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr("kvrelay.launcher.top.time.sleep", sleep)
    console = Console(file=io.StringIO(), width=160, force_terminal=True)
    with gateway(*SAID) as url, pytest.raises(KeyboardInterrupt):
        top.run(url, "k", console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "has ended the stream; trying again" in text
    assert text.count("pre-0") > 2


def test_a_picture_for_others_follows_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    is_shown, is_gone = threading.Event(), threading.Event()

    def pictures(*_: object) -> Iterator[str]:
        yield "up"
        is_shown.set()
        assert is_gone.wait(20)
        raise AnswerError("away")

    monkeypatch.setattr("kvrelay.launcher.top._pictures", pictures)
    picture = top.Picture("http://x")
    assert picture.last == ""
    with picture.watched():
        assert is_shown.wait(20)
        assert picture.last == "up"
        thread = next(one for one in threading.enumerate() if one.name == "picture")
    is_gone.set()
    thread.join(20)
    assert picture.last == ""


def test_a_picture_of_our_own_gateway_needs_no_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_drawn = threading.Event()

    def render(*_: object) -> str:
        is_drawn.set()
        return "up"

    monkeypatch.setattr("kvrelay.launcher.top.render", render)
    pair = write_pair(tmp_path, "gateway")
    with gateway(*SAID, certificate=pair, authorization=None) as url, top.Picture(url).watched():
        assert is_drawn.wait(20)


def test_it_reads_what_gateways_say() -> None:
    top.render(msgspec.to_builtins(ROSTER), msgspec.to_builtins(STATE))


def test_of_several_models_each_worker_has_its_own() -> None:
    def told(roster: Roster) -> str:
        console = Console(file=io.StringIO(), width=200)
        console.print(top.render(msgspec.to_builtins(roster), msgspec.to_builtins(STATE)))
        return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]

    first, second = ROSTER.workers
    other = msgspec.structs.replace(second, model="large")
    text = told(msgspec.structs.replace(ROSTER, models=["tiny", "large"], workers=[first, other]))
    assert re.search(r"worker +model +role", text)
    assert re.search(r"pre-0 +tiny +prefill", text)
    assert re.search(r"tcp://b:2 +large +decode", text)
    assert "model" not in told(ROSTER)
