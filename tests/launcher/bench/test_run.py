"""The whole command against a server in a thread: arguments reach the load, and measurements reach the result."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from kvrelay.common.errors import SettingsError
from kvrelay.common.settings import build
from kvrelay.launcher import cli
from kvrelay.launcher.bench.machine import CpuMeter
from kvrelay.launcher.bench.records import CpuUse, RunResult, read_result
from kvrelay.launcher.bench.run import doubts, settings_as_given
from kvrelay.launcher.bench.server import local_settings
from kvrelay.launcher.bench.settings import BenchSettings
from tests.launcher.bench.results import CPU, result
from tests.launcher.bench.stub_server import Answer, Request, StubServer, as_asked
from tests.ports import reserved_port

SMALL = ("--input-len", "8", "--output-len", "3")


def measured(server: StubServer, tmp_path: Path, *arguments: str, code: int = 0) -> RunResult:
    """The result of `kvrelay bench` with ``arguments`` against ``server``."""
    output = tmp_path / "new" / "run.json"
    command = ["bench", "--url", f"{server.url}/v1", "--warmup", "0", "--output", str(output), *arguments]
    assert cli.run(command) == code
    return read_result(output)


def prompts(server: StubServer) -> list[list[int]]:
    return [request.body["prompt"] for request in server.requests]


def test_a_run_from_the_command_line_to_the_file(
    server: StubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ("--rate", "50", "--requests", "10", "--warmup", "0.04s", "--arrival", "constant", "--slo", "ttft=1s")
    found = measured(server, tmp_path, *SMALL, *load, "--api-key", "secret")
    assert (found.name, found.model, found.url, found.slo) == ("stub", "stub", f"{server.url}/v1", {"ttft": 1.0})
    assert [record.index for record in found.requests] == list(range(12))
    assert [record.is_warmup for record in found.requests] == [True, True] + [False] * 10
    assert all(record.error is None and len(record.chunk_s) == 3 for record in found.requests)
    assert found.settings["rate"] == "50.0"
    assert found.settings["prompt_seed"].isdecimal()
    assert "secret" not in (tmp_path / "new" / "run.json").read_text()
    assert found.cpu is not None
    assert found.cpu.generator > 0
    assert {request.headers["authorization"] for request in server.requests} == {"Bearer secret"}
    assert {request.headers["x-kvrelay-timings"] for request in server.requests} == {"1"}
    first = min(record.due_s for record in found.requests if not record.is_warmup)
    assert found.duration_s == pytest.approx(max(record.finished_s for record in found.requests) - first)
    assert "first token" in capsys.readouterr().out


def test_two_runs_have_the_same_load_but_other_prompts(server: StubServer, tmp_path: Path) -> None:
    load = ("--rate", "100", "--requests", "6", "--input-len", "uniform:5-50")
    first, second = (measured(server, tmp_path, *load) for _ in range(2))
    assert [item.due_s for item in first.requests] == [item.due_s for item in second.requests]
    assert [item.prompt_tokens for item in first.requests] == [item.prompt_tokens for item in second.requests]
    assert len({tuple(prompt) for prompt in prompts(server)}) == 12


def test_the_servers_cpu_is_told_apart_if_its_process_is_named(server: StubServer, tmp_path: Path) -> None:
    load = ("--rate", "20", "--arrival", "constant", "--duration-s", "0.49", *SMALL)
    unknown = measured(server, tmp_path, *load)
    assert unknown.duration_s >= 0.49, "also if the last request was sent and answered before"
    assert unknown.cpu is not None
    assert unknown.cpu.server is None
    # The process's child does the work.
    spin = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {'while True: pass'!r}])"
    with subprocess.Popen([sys.executable, "-c", spin]) as busy:
        process = psutil.Process(busy.pid)
        try:
            while not (children := process.children()):
                assert busy.poll() is None
            known = measured(server, tmp_path, *load, "--server-pid", str(busy.pid)).cpu
        finally:
            busy.kill()
            for child in children:
                child.kill()
    assert known is not None
    assert known.server is not None
    assert known.server > 0.0


def test_cpu_use_is_that_of_the_time_that_counts() -> None:
    meter = CpuMeter(None)
    until_s = time.process_time() + 0.2
    while time.process_time() < until_s:
        pass
    meter.sample()
    from_s = time.monotonic()
    time.sleep(0.2)  # the time that is measured
    whole, counted = meter.use(), meter.use(from_s)
    assert whole is not None
    assert counted is not None
    assert counted.generator < 0.5 * whole.generator


def test_the_exit_code_is_1_if_every_request_failed(server: StubServer, tmp_path: Path) -> None:
    def only_the_sixth(request: Request) -> Answer:
        is_good = len(server.requests) == 6
        return as_asked(request) if is_good else Answer([b'{"error": {"message": "no room"}}'], status=503)

    server.answer = only_the_sixth
    load = (*SMALL, "--concurrency", "1", "--requests", "4")
    failed = measured(server, tmp_path, *load, code=1)
    assert {record.error for record in failed.requests} == {"http 503"}
    measured(server, tmp_path, *load)


def test_a_run_whose_requests_are_all_refused_stops_early_and_says_why(
    server: StubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answer = lambda request: Answer([b'{"error": {"message": "no such field"}}'], status=400)
    load = (*SMALL, "--rate", "20", "--arrival", "constant", "--duration-s", "600")
    found = measured(server, tmp_path, *load, code=1)
    assert found.duration_s < 60
    (warning,) = [one for one in found.warnings if "stopped early" in one]
    assert re.match(r"the last \d+ requests failed, at the end with http 400: no such field", warning)
    command = ["bench", "--url", server.url, "--warmup", "600", "--rate", "20", *SMALL]
    assert cli.run(command) == 1
    assert "http 400: no such field; so the run stopped in its warm-up" in capsys.readouterr().err


def test_ctrl_c_ends_the_run_and_shows_what_there_is(server: StubServer, tmp_path: Path) -> None:
    def answer(request: Request) -> Answer:
        if len(server.requests) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return as_asked(request)

    server.answer = answer
    found = measured(server, tmp_path, *SMALL, "--concurrency", "1", "--duration-s", "600")
    assert len(found.requests) >= 4
    assert found.duration_s < 600
    assert any("interrupted" in warning for warning in found.warnings)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "other"], "does not serve 'other'; it serves stub"),
        (["--rate", "1", "--concurrency", "1"], "--rate and --concurrency are given"),
        (["--slo", "tpot=1"], "--slo: unknown key 'tpot'; known are: e2e, itl, ttft"),
        (["--token-ids", "9"], "--token-ids is '9'; write LOW-HIGH"),
        (["--token-ids", f"1-{10**20}"], "write LOW-HIGH"),
        (["--prompt-seed", "-1"], "--prompt-seed is -1; it must be at least 0"),
        (["--serve", "prefill=1"], "--url and --self-serve are both given"),
        (["--output", "/dev/null/x/y"], "--output: cannot make /dev/null/x"),
        (["--output", "."], "--output is '.'; it must be a file"),
        (["--server-pid", "4194305"], "--server-pid is 4194305: there is no such process on this machine"),
        (["--api-key", "a\nb"], "--api-key: a header can only carry printable ASCII"),
    ],
)
def test_what_cannot_be_measured_is_said(
    arguments: list[str], message: str, server: StubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["bench", "--url", server.url, *arguments]) in (1, 2)
    assert message in capsys.readouterr().err
    assert server.requests == []


def test_figures_are_shown_although_the_disk_is_full(
    server: StubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").symlink_to("/dev/full")
    load = (*SMALL, "--warmup", "0", "--requests", "2", "--output", str(tmp_path / "full"))
    assert cli.run(["bench", "--url", server.url, *load]) == 1
    said = capsys.readouterr()
    assert "full (No space left on device); the figures are above" in said.err
    assert "inter-token" in said.out


def test_what_is_no_url_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "--url", "http://[::1"]) == 2
    assert "--url is 'http://[::1': Invalid IPv6 URL" in capsys.readouterr().err


def test_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with reserved_port() as port:
        url = f"http://127.0.0.1:{port}"
        assert cli.run(["bench", "--url", url]) == 1
    text = capsys.readouterr().err
    assert f"{url} does not answer" in text
    assert "start a server there" in text


def test_what_self_serve_starts() -> None:
    local = local_settings(build(BenchSettings, {"serve": "prefill=2, local-prefill=never", "model": "m"}))
    assert (local.gateway.model, local.deployment.prefill, local.gateway.relay.local_prefill) == (("m",), 2, "never")
    assert local.gateway.port == 0
    assert local_settings(build(BenchSettings, {"self_serve": True})).gateway.model == ("demo",)
    with pytest.raises(SettingsError, match="--serve: unknown key 'prefil'; did you mean 'prefill'"):
        local_settings(build(BenchSettings, {"serve": "prefil=2"}))
    with pytest.raises(SettingsError, match="--serve: --decode is 0; it must be at least 1"):
        local_settings(build(BenchSettings, {"serve": "decode=0"}))


def test_the_settings_of_a_result_build_the_same_settings_again() -> None:
    settings = build(BenchSettings, {"rate": 2.5, "api_key": "k", "ignore_eos": False, "slo": "e2e=1s"})
    given = settings_as_given(settings)
    assert "api_key" not in given
    again = build(BenchSettings, given)
    assert again == dataclasses.replace(settings, target=dataclasses.replace(settings.target, api_key=None))


@pytest.mark.parametrize(
    ("record", "cpu", "words"),
    [
        ({}, {}, []),
        ({"has_usage": False}, {}, ["the server did not count the tokens of 1 answers"]),
        ({"due_s": -0.5}, {}, ["requests were sent up to 500 ms after they were due"]),
        ({}, {"generator": 0.9}, ["the generator used 0.90 cores of the one"]),
        ({}, {"generator_max_lag_s": 0.3}, ["late by up to 300 ms"]),
    ],
)
def test_what_makes_figures_doubtful_is_said(
    record: dict[str, object], cpu: dict[str, float], words: list[str]
) -> None:
    counted = [msgspec.structs.replace(result().requests[0], **record)]
    use: CpuUse = msgspec.structs.replace(CPU, **cpu)
    said = doubts(counted, use)
    assert len(said) == len(words)
    assert all(part in text for part, text in zip(words, said, strict=True))
