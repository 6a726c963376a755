"""The whole command against a server in a thread; tables and plots are replaced by what notes that they were asked for."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from kvrelay.common.errors import SettingsError
from kvrelay.common.settings import build
from kvrelay.launcher import cli
from kvrelay.launcher.bench.cpu import CpuMeter, machine_times
from kvrelay.launcher.bench.doubts import doubts
from kvrelay.launcher.bench.environment import environment
from kvrelay.launcher.bench.errors import BenchError
from kvrelay.launcher.bench.records import CpuUse, RequestRecord, RunResult, read_result
from kvrelay.launcher.bench.run import settings_as_given
from kvrelay.launcher.bench.server import local_settings, served_model
from kvrelay.launcher.bench.settings import BenchSettings
from tests.launcher.bench.stub_server import Answer, Request, StubServer, as_asked


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("KVRELAY_"):
            monkeypatch.delenv(name)


@pytest.fixture
def server() -> Iterator[StubServer]:
    with StubServer().in_thread() as stub:
        yield stub


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


SMALL = ["--input-len", "8", "--output-len", "3"]


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
    arguments = ["bench", "--url", server.url, "--rate", "100", "--requests", "6", "--input-len", "uniform:5-50"]
    assert cli.run(arguments) == cli.run(arguments) == 0
    first, second = shown.tables
    assert [item.due_s for item in first.requests] == [item.due_s for item in second.requests]
    assert [item.prompt_tokens for item in first.requests] == [item.prompt_tokens for item in second.requests]
    prompts = {tuple(request.body["prompt"]) for request in server.requests}
    assert len(prompts) == 12


def test_chats_and_processes(server: StubServer, shown: Shown) -> None:
    arguments = ["bench", "--url", server.url, *SMALL, "--api", "chat", "--concurrency", "2", "--requests", "8"]
    assert cli.run([*arguments, "--processes", "2", "--name", "chats"]) == 0
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
        (["--slo", "tpot=1"], "--slo: unknown key 'tpot'; known are ttft, itl, e2e"),
        (["--token-ids", "9"], "--token-ids is '9'; write LOW-HIGH"),
        (["--serve", "prefill=1"], "--url and --self-serve are both given"),
        (["--plots", "/dev/null/x"], "--plots: cannot make /dev/null/x"),
        (["--output", "."], "--output is '.'; it must be a file"),
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
    assert (local.model, local.prefill, local.local_prefill_max_tokens, local.port) == ("m", 2, 0, 0)
    assert local_settings(build(BenchSettings, {"self_serve": True})).model == "demo"
    with pytest.raises(SettingsError, match="--serve: unknown key 'prefil'; known are model, prefill"):
        local_settings(build(BenchSettings, {"serve": "prefil=2"}))
    with pytest.raises(SettingsError, match="--serve: --decode is 0; it must be at least 1"):
        local_settings(build(BenchSettings, {"serve": "decode=0"}))


def test_the_settings_of_a_result_build_the_same_settings_again() -> None:
    settings = build(BenchSettings, {"rate": 2.5, "api_key": "k", "ignore_eos": False, "slo": "e2e=1s"})
    given = settings_as_given(settings)
    assert "api_key" not in given
    again = build(BenchSettings, given)
    assert again == dataclasses.replace(settings, target=dataclasses.replace(settings.target, api_key=None))


def record(late_s: float) -> RequestRecord:
    return RequestRecord(
        index=0,
        stream="main",
        due_s=1,
        sent_s=1 + late_s,
        finished_s=2,
        prompt_tokens=1,
        planned_output_tokens=1,
        output_tokens=1,
    )


QUIET = CpuUse(num_cores=2, generator=0.1, server=1.5, others=0.05, stolen=0.0, generator_max_lag_s=0.01)


@pytest.mark.parametrize(
    ("changes", "late_s", "words"),
    [
        ({}, 0.001, []),
        ({}, 0.5, ["1 of 2 requests were sent more than 20 ms after they were due, the latest 500 ms"]),
        ({"generator": 0.9, "server": 0.5}, 0, ["the generator used 0.90 cores with 1 process:"]),
        ({"generator": 0.4}, 0, ["all cores were busy and the generator used 0.40"]),
        ({"generator_max_lag_s": 0.3}, 0, ["late by up to 300 ms"]),
        ({"others": 0.3}, 0, ["other programs used 0.30 of 2 cores"]),
        ({"stolen": 0.1}, 0, ["the hypervisor took 0.10 of 2 cores"]),
    ],
)
def test_doubts(changes: dict[str, float], late_s: float, words: list[str]) -> None:
    cpu = CpuUse(**{name: changes.get(name, getattr(QUIET, name)) for name in CpuUse.__struct_fields__})
    found = doubts([record(0), record(late_s)], cpu, num_processes=1, is_self_served=True)
    assert len(found) == len(words), found
    assert all(part in text for part, text in zip(words, found, strict=True))


def test_the_meter_sees_what_this_process_uses() -> None:
    meter = CpuMeter(list, lambda: [os.getppid()])
    meter.start()
    before = machine_times()
    assert before is not None
    sum(range(3_000_000))
    use = meter.stop(0.0)
    assert use is not None
    assert use.generator > 0
    assert use.num_cores == before.num_cores >= 1
    assert machine_times(Path("/no/such/file")) is None


def test_the_environment_names_the_machine_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_API_KEY", "secret")
    monkeypatch.setenv("KVRELAY_MAX_NUM_SEQS", "7")
    found = environment()
    assert {"cpu", "cores", "kernel", "python", "kvrelay", "torch"} <= found.keys()
    assert found["KVRELAY_MAX_NUM_SEQS"] == "7"
    assert "secret" not in found.values()
