"""The whole command against a server in a thread; tables and plots are replaced by what notes that they were asked for."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import msgspec
import pytest

import kvrelay
from kvrelay.common.errors import SettingsError
from kvrelay.common.settings import build
from kvrelay.launcher import cli
from kvrelay.launcher.bench.cpu import CpuMeter
from kvrelay.launcher.bench.environment import checkout_commit, environment
from kvrelay.launcher.bench.errors import BenchError
from kvrelay.launcher.bench.generator import Report
from kvrelay.launcher.bench.prepare import check_server_pid
from kvrelay.launcher.bench.records import CpuUse, RequestRecord, RunResult, read_result
from kvrelay.launcher.bench.run import counted_cpu, settings_as_given, window_of
from kvrelay.launcher.bench.server import local_settings, served_model
from kvrelay.launcher.bench.settings import BenchSettings
from kvrelay.launcher.bench.spec import workload_spec
from kvrelay.launcher.bench.summary import summarize
from tests.launcher.bench.results import CPU, result
from tests.launcher.bench.stub_server import Answer, Request, StubServer, as_asked


class Shown(SimpleNamespace):
    """What the report was asked to show."""

    tables: list[RunResult]
    plots: list[tuple[list[RunResult], Path]]
    compared: list[tuple[list[Path], Path | None]]


@pytest.fixture(autouse=True)
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    found = Shown(tables=[], plots=[], compared=[])
    functions = {
        "report": {"print_report": lambda result, console: found.tables.append(result)},
        "plots": {"write_plots": lambda results, directory: found.plots.append((results, directory))},
        "compare": {"run_compare": lambda paths, plots: found.compared.append((paths, plots)) or 3},
    }
    for name, content in functions.items():
        module = ModuleType(f"kvrelay.launcher.bench.{name}")
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return found


SMALL = ["--input-len", "8", "--output-len", "3", "--warmup", "0"]


def test_a_run_from_the_command_line_to_the_file(server: StubServer, shown: Shown, tmp_path: Path) -> None:
    output = tmp_path / "new" / "run.json"
    arguments = ["bench", "--url", f"{server.url}/v1", *SMALL, "--rate", "50", "--requests", "10", "--warmup", "2"]
    arguments += [
        "--slo",
        "ttft=1s",
        "--output",
        str(output),
        "--plots",
        str(tmp_path / "plots"),
        "--api-key",
        "secret",
    ]
    assert cli.run(arguments) == 0
    result = read_result(output)
    assert result == shown.tables[0]
    assert shown.plots == [([result], tmp_path / "plots")]
    assert (result.name, result.model, result.url, result.slo) == ("stub", "stub", f"{server.url}/v1", {"ttft": 1.0})
    assert [record.index for record in result.requests] == list(range(12))
    assert [record.is_warmup for record in result.requests] == [True, True] + [False] * 10
    assert all(record.error is None and len(record.chunk_s) == 3 for record in result.requests)
    assert result.settings["rate"] == "50.0"
    assert result.settings["prompt_seed"].isdecimal()
    assert "secret" not in output.read_text()
    assert result.cpu is not None
    assert result.cpu.generator > 0
    assert {request.headers["authorization"] for request in server.requests} == {"Bearer secret"}
    assert {request.headers["x-kvrelay-timings"] for request in server.requests} == {"1"}
    first = min(record.due_s for record in result.requests if not record.is_warmup)
    assert result.duration_s == pytest.approx(max(record.finished_s for record in result.requests) - first)


def test_two_runs_have_the_same_load_but_other_prompts(server: StubServer, shown: Shown) -> None:
    arguments = ["bench", "--url", server.url, "--rate", "100", "--requests", "6"]
    arguments += ["--input-len", "uniform:5-50", "--warmup", "0"]
    assert cli.run(arguments) == cli.run(arguments) == 0
    first, second = shown.tables
    assert [item.due_s for item in first.requests] == [item.due_s for item in second.requests]
    assert [item.prompt_tokens for item in first.requests] == [item.prompt_tokens for item in second.requests]
    prompts = {tuple(request.body["prompt"]) for request in server.requests}
    assert len(prompts) == 12


def test_the_seed_decides_the_seeds_of_sampling(server: StubServer) -> None:
    arguments = ["bench", "--url", server.url, *SMALL, "--concurrency", "1", "--requests", "3", "--temperature", "0.5"]
    for seed in ("1", "1", "2"):
        assert cli.run([*arguments, "--seed", seed]) == 0
    seeds = [request.body["seed"] for request in server.requests]
    assert seeds[:3] == seeds[3:6]
    assert len(set(seeds)) == 6


def test_cpu_use_and_lateness_are_of_the_time_that_counts() -> None:
    """Warm-up until 10 s, answers until 20 s, a request that hangs until 100 s; the run began at 1000 s."""

    class Meter(CpuMeter):
        asked: dict[str, float | None]

        def stop(self, max_lag_s: float, *, from_s: float | None = None, until_s: float | None = None) -> CpuUse:
            self.asked = {"from_s": from_s, "until_s": until_s}
            return msgspec.structs.replace(CPU, generator_max_lag_s=max_lag_s)

    def record(due_s: float, finished_s: float, **changes: object) -> RequestRecord:
        times = {"due_s": due_s, "sent_s": due_s, "finished_s": finished_s}
        return msgspec.structs.replace(result().requests[0], **{**times, **changes})

    records = [record(0.0, 9.0, is_warmup=True), record(10.0, 20.0), record(11.0, 100.0, error="timeout")]
    meter = Meter(list, None)
    report = Report(records, False, [(5.0, 0.9), (15.0, 0.01), (50.0, 0.8)])
    window = window_of(workload_spec(build(BenchSettings, {"concurrency": 1, "requests": 3})), report)
    cpu = counted_cpu(meter, report, window, 1000.0)
    assert meter.asked == {"from_s": 1010.0, "until_s": 1020.0}
    assert cpu is not None
    assert cpu.generator_max_lag_s == 0.01


@pytest.mark.parametrize(
    ("values", "is_stopped", "until_s"),
    [
        ({"concurrency": 1, "duration_s": 60}, False, 61.0),
        ({"concurrency": 1, "duration_s": 60}, True, 3.0),  # it was not given its time
        ({"concurrency": 1, "requests": 1}, False, 3.0),
        ({"trace": "t.jsonl", "duration_s": 60}, False, 3.0),  # which may be shorter
    ],
)
def test_the_time_that_was_asked_for_counts_unless_the_load_was_over_before(
    values: dict[str, object], is_stopped: bool, until_s: float
) -> None:
    record = msgspec.structs.replace(result().requests[0], due_s=1.0, sent_s=1.0, finished_s=3.0, error=None)
    report = Report([record], is_stopped, [])
    assert window_of(workload_spec(build(BenchSettings, values)), report) == (1.0, until_s)


@pytest.mark.parametrize("api", ["text", "chat"])
def test_words(server: StubServer, shown: Shown, api: str) -> None:
    arguments = ["bench", "--url", server.url, *SMALL, "--api", api, "--concurrency", "2", "--requests", "8"]
    assert cli.run([*arguments, "--name", "chats"]) == 0
    assert len(shown.tables[0].requests) == 8
    assert shown.tables[0].name == "chats"
    assert {record.prompt_tokens for record in shown.tables[0].requests} == {8}


def test_the_exit_code_is_1_if_every_request_failed(server: StubServer, shown: Shown) -> None:
    arguments = ["bench", "--url", server.url, *SMALL, "--concurrency", "1", "--requests", "4"]

    def only_the_sixth(request: Request) -> Answer:
        return as_asked(request) if len(server.requests) == 6 else refused(request)

    server.answer = only_the_sixth
    assert cli.run(arguments) == 1
    assert {record.error for record in shown.tables[0].requests} == {"http 503"}
    assert cli.run(arguments) == 0


def test_a_request_that_hangs_is_named_and_stretches_nothing(server: StubServer, shown: Shown) -> None:
    never = asyncio.Event()

    async def hang() -> None:
        await never.wait()

    def answer(request: Request) -> Answer:
        given = as_asked(request)
        if len(server.requests) == 3:
            given.wait = hang
        return given

    server.answer = answer
    arguments = ["bench", "--url", server.url, *SMALL, "--rate", "100", "--requests", "10", "--timeout-s", "2"]
    assert cli.run(arguments) == 0
    (result,) = shown.tables
    (hung,) = (record for record in result.requests if record.error is not None)
    others = [record for record in result.requests if record.error is None]
    ends = [*(record.finished_s for record in others), *(record.sent_s for record in result.requests)]
    assert hung.error == "timeout"
    assert hung.chunk_s
    assert result.duration_s == pytest.approx(max(ends) - min(record.due_s for record in result.requests))
    assert result.warnings[0].startswith("1 of 10 requests failed (1 timeout)")
    itl = summarize(result).all.itl
    assert itl is not None
    assert itl.max == pytest.approx(hung.finished_s - hung.chunk_s[-1])


def refused(_: Request) -> Answer:
    return Answer([b'{"error": {"message": "no room"}}'], status=503)


def test_ctrl_c_ends_the_run_and_shows_what_there_is(server: StubServer, shown: Shown) -> None:
    def answer(request: Request) -> Answer:
        if len(server.requests) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return as_asked(request)

    server.answer = answer
    assert cli.run(["bench", "--url", server.url, *SMALL, "--concurrency", "1", "--duration-s", "600"]) == 0
    assert len(shown.tables[0].requests) >= 4
    assert any("interrupted" in warning for warning in shown.tables[0].warnings)
    assert threading.current_thread() is threading.main_thread()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "other"], "does not serve 'other'; --model must be one of stub"),
        (["--input-len", "5000"], "every request asks for more than the 4096 tokens"),
        (["--rate", "1", "--concurrency", "1"], "--rate and --concurrency are given"),
        (["--slo", "tpot=1"], "--slo: unknown key 'tpot'; known are: e2e, itl, ttft"),
        (["--token-ids", "9"], "--token-ids is '9'; write LOW-HIGH"),
        (["--serve", "prefill=1"], "--url and --self-serve are both given"),
        (["--plots", "/dev/null/x"], "--plots: cannot make /dev/null/x"),
        (["--output", "."], "--output is '.'; it must be a file"),
        (["--output", "/proc/run.json"], "--output: cannot write in /proc"),
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


def test_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with StubServer().in_thread() as stub:
        url = stub.url
    assert cli.run(["bench", "--url", url]) == 1
    assert f"{url} does not answer" in capsys.readouterr().err
    with pytest.raises(BenchError, match="or let bench start one with --self-serve"):
        served_model(url, None, None)


def test_compare_is_a_subcommand(shown: Shown, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "compare", "a.json", "b.json", "--plots", "p"]) == 3
    assert shown.compared == [([Path("a.json"), Path("b.json")], Path("p"))]
    assert cli.run(["bench", "nonsense"]) == 2
    assert cli.run(["bench", "compare"]) == 2
    capsys.readouterr()
    assert cli.run(["bench", "--help"]) == 0
    text = capsys.readouterr().out
    assert "kvrelay bench compare colocated.json disaggregated.json" in text
    assert "KVRELAY_CONCURRENCY" in text


def test_what_self_serve_starts() -> None:
    local = local_settings(build(BenchSettings, {"serve": "prefill=2, local-prefill-max-tokens=0", "model": "m"}))
    assert (local.gateway.model, local.deployment.prefill, local.gateway.relay.local_prefill_max_tokens) == ("m", 2, 0)
    assert local.gateway.port == 0
    assert local_settings(build(BenchSettings, {"self_serve": True})).gateway.model == "demo"
    with pytest.raises(SettingsError, match="--serve: unknown key 'prefil'; did you mean 'prefill'"):
        local_settings(build(BenchSettings, {"serve": "prefil=2"}))
    with pytest.raises(SettingsError, match="--serve: --decode is 0; it must be at least 1"):
        local_settings(build(BenchSettings, {"serve": "decode=0"}))
    with pytest.raises(SettingsError, match="--server-pid is given with --self-serve"):
        check_server_pid(build(BenchSettings, {"self_serve": True, "server_pid": [os.getpid()]}))


def test_the_settings_of_a_result_build_the_same_settings_again() -> None:
    settings = build(BenchSettings, {"rate": 2.5, "api_key": "k", "ignore_eos": False, "slo": "e2e=1s"})
    given = settings_as_given(settings)
    assert "api_key" not in given
    again = build(BenchSettings, given)
    assert again == dataclasses.replace(settings, target=dataclasses.replace(settings.target, api_key=None))


def test_the_environment_names_the_machine_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_API_KEY", "secret")
    monkeypatch.setenv("KVRELAY_MAX_NUM_SEQS", "7")
    found = environment()
    assert {"cpu", "cores", "kernel", "python", "kvrelay", "torch"} <= found.keys()
    assert found["KVRELAY_MAX_NUM_SEQS"] == "7"
    assert "secret" not in found.values()


def test_the_environment_names_the_commit_of_a_checkout_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "src" / "kvrelay" / "__init__.py"
    package.parent.mkdir(parents=True)
    package.touch()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-C", str(tmp_path)]
    assert checkout_commit(package) is None
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *arguments], check=True, capture_output=True)
    commit = checkout_commit(package)
    assert commit is not None
    monkeypatch.setattr(kvrelay, "__file__", str(package))
    assert environment()["commit"] == commit
    assert re.fullmatch("[0-9a-f]{12}", commit)
    package.write_text("changed = True")
    assert checkout_commit(package) == f"{commit}-dirty"
    # Installed in an environment that lies in somebody's checkout.
    assert checkout_commit(tmp_path / "site-packages" / "kvrelay" / "__init__.py") is None
