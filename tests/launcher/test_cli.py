"""The command line: help, precedence of settings, errors and exit codes."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvrelay.common.errors import ModelError, SettingsError
from kvrelay.common.settings import describe, setting
from kvrelay.decode_worker.settings import DecodeSettings
from kvrelay.gateway.http.api_keys import ApiKeys
from kvrelay.launcher import cli, commands
from kvrelay.launcher.options import Options
from kvrelay.launcher.settings import COMPONENTS, local_infos


@dataclass(frozen=True, slots=True)
class Group:
    max_num_seqs: int = setting(8, "how many", minimum=1)


@dataclass(frozen=True, slots=True)
class Sample:
    group: Group
    peers: tuple[str, ...] = setting((), "addresses")
    verbose: bool = setting(False, "talk")
    wait_s: float | None = setting(None, "patience", unit="s")


COMMANDS = ["local", "gateway", "prefill-worker", "decode-worker", "verify"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_flags_variables_and_defaults(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([command, "--help" if command == "verify" else "--help-all"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--config FILE" in text
    assert "--model TEXT" in text
    assert "KVRELAY_MODEL" in text
    assert "default: demo" in text
    for info in cli._options(commands.COMMANDS[command]).infos:
        assert f" {info.flag}" in text
        assert info.variable in text


@pytest.mark.parametrize("command", [name for name, entry in commands.COMMANDS.items() if entry.common])
def test_help_shows_what_most_people_set(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 80
    infos = {info.name: info for info in cli._options(commands.COMMANDS[command]).infos}
    listed = {line.split()[0] for line in text.splitlines() if line.startswith("  --")}
    shown = [name for name, info in infos.items() if info.flag in listed]
    assert sorted(shown) == sorted(commands.COMMANDS[command].common)
    assert f"kvrelay {command} --help-all" in text


def test_an_option_that_help_does_not_show_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["local", "--max-attempts", "0"]) == 2
    assert "--max-attempts is 0; it must be at least 1" in capsys.readouterr().err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in [*COMMANDS, "fetch"])
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kvrelay, version ")


def test_help_names_the_commands_whose_options_are_variables_too() -> None:
    named = " ".join((cli.cli.help or "").split()).partition(" can also be given as a variable")[0]
    named = named.rpartition("Every option of ")[2]
    assert re.split(", | and ", named) == list(commands.COMMANDS)


def test_the_page_names_the_settings_that_local_does_not_take() -> None:
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text(encoding="utf-8")
    [flags] = re.findall(r"`kvrelay local` takes all settings below, but chooses these itself:\n(.*)\n", page)
    of_components = {info.flag for component in COMPONENTS for info in describe(component)}
    assert set(re.findall(r"`([^`]+)`", flags)) == of_components - {info.flag for info in local_infos()}


def test_help_and_the_gateways_settings_load_nothing_heavy() -> None:
    code = (
        "import sys; from kvrelay.launcher.cli import run; run(['--help']); run(['gateway', '--help']);"
        "heavy = {'torch', 'transformers', 'rich', 'numpy', 'zmq', 'fastapi', 'huggingface_hub'} & set(sys.modules);"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_flag_wins_over_a_variable_a_variable_over_the_file(tmp_path: Path) -> None:
    config = tmp_path / "kvrelay.toml"
    config.write_text('max-num-seqs = 2\nwait_s = 1.5\npeers = ["a", "b"]\nverbose = true\n')
    flags: dict[str, Any] = {"config_file": str(config), "max_num_seqs": None, "verbose": None}
    assert Options.of(Sample).load(flags, {}) == Sample(Group(2), ("a", "b"), True, 1.5)
    variables = {"KVRELAY_MAX_NUM_SEQS": "3", "KVRELAY_PEERS": "c, d", "KVRELAY_WAIT_S": ""}
    assert Options.of(Sample).load(flags, variables) == Sample(Group(3), ("c", "d"), True, 1.5)
    flags |= {"max_num_seqs": "4", "verbose": False, "peers": ""}
    assert Options.of(Sample).load(flags, variables) == Sample(Group(4), (), False, 1.5)
    assert Options.of(Sample).load({}, {"KVRELAY_CONFIG": str(config)}).group.max_num_seqs == 2
    assert Options.of(Sample).load({}, {}) == Sample(Group(8), (), False, None)


@pytest.mark.parametrize(
    ("flags", "variables", "file", "message"),
    [
        ({"max_num_seqs": "0"}, {}, "", "command line: --max-num-seqs is 0; it must be at least 1"),
        ({}, {"KVRELAY_MAX_NUM_SEQS": "x"}, "", "environment: --max-num-seqs takes a whole number, not 'x'"),
        ({}, {}, "max_num_seq = 3", "unknown setting 'max_num_seq'; did you mean 'max_num_seqs'"),
        ({"max_num_seqs": "1"}, {}, "wait_s = 'long'", "--wait-s takes a number, not 'long'"),
        (
            {},
            {"KVRELAY_MAX_NUM_SEQ": "3"},
            "",
            "KVRELAY_MAX_NUM_SEQ is no setting of any command; did you",
        ),
        ({}, {}, "[group]\nmax_num_seqs = 1", r"flat keys, not tables; found \[group\]"),
        ({}, {}, "max_num_seqs", "is not TOML"),
    ],
)
def test_bad_settings_name_their_source_value_and_limit(
    flags: dict[str, str], variables: dict[str, str], file: str, message: str, tmp_path: Path
) -> None:
    config = tmp_path / "kvrelay.toml"
    config.write_text(file)
    with pytest.raises(SettingsError, match=message):
        Options.of(Sample).load({"config_file": str(config), **flags}, variables)


def test_a_config_file_that_is_not_there() -> None:
    with pytest.raises(SettingsError, match=r"--config: cannot read /no/such.toml \(No such file or directory\)"):
        Options.of(Sample).load({"config_file": "/no/such.toml"}, {})


def test_a_variable_of_another_command_means_nothing_and_one_of_none_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvrelay.launcher.components.run_gateway", lambda _: 5)
    monkeypatch.setenv("KVRELAY_MAX_NUM_SEQS", "9")  # a variable of workers
    assert cli.run(["gateway"]) == 5
    monkeypatch.setenv("KVRELAY_SERVED_MODEL", "x")
    assert cli.run(["gateway"]) == 2
    assert "KVRELAY_SERVED_MODEL is no setting of any command; did you mean 'KVRELAY_SERVED_MODEL_NAME'?" in (
        capsys.readouterr().err
    )


def test_a_component_gets_its_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[DecodeSettings] = []
    monkeypatch.setattr("kvrelay.launcher.components.run_decode_worker", lambda settings: seen.append(settings) or 5)
    monkeypatch.setenv("KVRELAY_MAX_NUM_SEQS", "9")
    config = tmp_path / "kvrelay.toml"
    config.write_text("block_size = 32\nmax_num_seqs = 7\n")
    assert cli.run(["decode-worker", "--config", str(config), "--dtype", "float32"]) == 5
    assert (seen[0].kv.block_size, seen[0].scheduler.max_num_seqs, seen[0].model.dtype) == (32, 9, "float32")


@pytest.mark.parametrize(
    ("error", "code"), [(SettingsError("bad value"), 2), (ModelError("bad model"), 1), (KeyboardInterrupt(), 130)]
)
def test_an_error_is_one_line_and_an_exit_code(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr("kvrelay.launcher.components.run_gateway", fail)
    assert cli.run(["gateway"]) == code
    stderr = capsys.readouterr().err
    assert stderr.strip() == (f"kvrelay: {error}" if str(error) else "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["local", "--decode", "0"], "--decode is 0; it must be at least 1"),
        (["local", "--device", "tpu"], "--device is 'tpu'; it must be one of auto, cpu, cuda"),
        (["local", "--nonsense"], "No such option"),
        (["nonsense"], "No such command"),
    ],
)
def test_a_wrong_command_line_ends_with_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_text_that_is_not_utf_8_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_bytes(b"caf\xe9")
    assert cli.run(["watermark", str(tmp_path / "text")]) == 2
    assert "text is not UTF-8" in capsys.readouterr().err


def test_a_component_ends_at_sigterm_before_it_serves() -> None:
    """By a handler: the kernel does nothing at a signal without one to the first process of a container."""
    script = """
import time
from kvrelay.launcher import cli, components

def download(*_, **__):
    print("downloading", flush=True)
    while True:  # one long wait would miss a signal that comes just before it
        time.sleep(0.05)

components.resolve_model = download
cli.main(["gateway"])
"""
    with subprocess.Popen([sys.executable, "-P", "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "downloading\n"
        process.terminate()
        assert process.wait(20) == 143


@pytest.mark.parametrize(("node", "looked_for"), [("0", ["m", "d"]), ("1", ["m"])])
def test_only_the_first_node_looks_for_a_draft_model(
    monkeypatch: pytest.MonkeyPatch, node: str, looked_for: list[str]
) -> None:
    found: list[str] = []
    monkeypatch.setattr("kvrelay.launcher.components._end_at_sigterm", lambda: None)
    monkeypatch.setattr("kvrelay.launcher.components.resolve_model", lambda name, **_: found.append(name) or name)
    monkeypatch.setattr("kvrelay.decode_worker.worker.serve", lambda settings: 5)
    nodes = ["--tensor-parallel", "2", "--nodes", "2", "--leader-address", "tcp://10.0.0.1:1", "--node-rank", node]
    drafting = ["--model", "m", "--speculation", "draft-model", "--draft-model", "d"]
    assert cli.run(["decode-worker", *nodes, *drafting]) == 5
    assert found == looked_for


def test_a_package_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> int:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr("kvrelay.launcher.components.run_decode_worker", fail)
    assert cli.run(["decode-worker"]) == 1
    assert "needs the package 'torch'" in capsys.readouterr().err


def test_fetch_prints_the_directory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("kvrelay.launcher.models.resolve_model", lambda name: tmp_path / name)
    assert cli.run(["fetch", "m"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'm'}\n"


def test_keys_are_made_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.run(["keys", str(tmp_path / "new")]) == 0
    assert [Path(line) for line in capsys.readouterr().out.splitlines()] == [
        tmp_path / "new" / f"{role}.{kind}" for role in ("gateway", "prefill", "decode") for kind in ("key", "pem")
    ]
    assert cli.run(["keys", str(tmp_path / "new")]) == 1
    assert "would be overwritten" in capsys.readouterr().err


def test_an_api_key_and_its_line_belong_together(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """stdout has the line for the key file, stderr has the key. A file with that line accepts the key."""
    assert cli.run(["api-key", "alice"]) == 0
    said = capsys.readouterr()
    key = said.err.rsplit(" ", 1)[1].strip()
    assert key not in said.out
    (tmp_path / "keys").write_text(said.out)
    assert ApiKeys(tmp_path / "keys", lambda: 0.0).check(f"Bearer {key}") == "alice"


@pytest.mark.parametrize("name", ["bad name", "", "x" * 65, "#1"])
def test_a_name_that_a_gateway_refuses_makes_no_key(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["api-key", name]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "it must be 1 to 64 letters" in said.err


def test_a_worker_that_others_can_reach_needs_keys() -> None:
    """Runs in its own process, because a worker takes over its process's logging."""
    command = ["decode-worker", "--engine", "fake", "--address", "tcp://0.0.0.0:0"]
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "kvrelay.launcher", *command], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert "without --keys anybody there could read, forge and cancel requests" in ended.stderr
