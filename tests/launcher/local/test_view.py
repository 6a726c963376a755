"""The texts that users see of a deployment."""

from __future__ import annotations

import io
import os

from rich.console import Console

from kvrelay.launcher.local.supervisor import State, Status
from kvrelay.launcher.local.view import View
from kvrelay.launcher.top import Picture

NOBODY = Picture("http://127.0.0.1:9")  # no server answers there


def status(state: State, **changes: object) -> Status:
    fields: dict[str, object] = {
        "name": "decode-0",
        "state": state,
        "pid": 7,
        "state_s": 3.0,
        "load_s": 2.5,
        "rss_bytes": 5 * 2**20,
        "num_restarts": 0,
    }
    return Status(**{**fields, **changes})  # type: ignore[arg-type]


def test_plain_lines() -> None:
    stream = io.StringIO()
    view = View(Console(file=stream, width=20), list, NOBODY, hide_logs=False)
    with view.shown():
        view.on_line("decode-0", "hello [not markup]")
        view.on_state(status(State.READY))
        view.on_state(status(State.READY, is_back=True))
        view.on_state(status(State.DIED, detail="exit code 3"))
    assert stream.getvalue().splitlines() == [
        "decode-0  | hello [not markup]",
        "kvrelay   | decode-0: ready after 2.5 s (5 MiB)",
        "kvrelay   | decode-0: ready again (5 MiB)",
        "kvrelay   | decode-0: died (exit code 3); it is started again",
    ]


def test_hidden_logs_and_a_stream_that_is_gone() -> None:
    stream = io.StringIO()
    view = View(Console(file=stream), list, NOBODY, hide_logs=True)
    view.on_line("decode-0", "hello")
    assert stream.getvalue() == ""
    stream.close()
    view.say("nobody hears this")


def test_a_pipe_that_nobody_reads_ends_nothing() -> None:
    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    before = os.dup(1)
    try:
        View(Console(file=Gone()), list, NOBODY, hide_logs=False).say("nobody hears this")
    finally:
        os.dup2(before, 1)
        os.close(before)


def test_the_table_on_a_terminal() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=140)
    states = [status(State.READY), status(State.DIED, name="gateway", detail="exit code 3", num_restarts=2)]
    view = View(console, lambda: states, NOBODY, hide_logs=False)
    with view.shown():
        view.on_line("decode-0", "hello [not markup]")
        view.on_state(states[1])
        view.say("ready")
    shown = stream.getvalue()
    for text in ("hello [not markup]", "gateway: died (exit code 3)", "component", "5 MiB", "restarts"):
        assert text in shown
