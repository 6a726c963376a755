"""``kvrelay local`` as a process with fake components: signals, exits, ports, and clean-up."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvrelay.launcher import cli
from kvrelay.launcher.errors import PortTakenError
from kvrelay.launcher.local.deployment import ready_text
from kvrelay.launcher.local.ports import check_free, free_ports
from kvrelay.launcher.local.process import ComponentSpec
from tests.launcher.conftest import MakeSpec

# A launcher with given components, each (name, command, ready_url, stop_rank).
LAUNCHER = """
import json, sys
from kvrelay.common.errors import KvrelayError
from kvrelay.launcher.local.deployment import LocalDeployment, ready_text, serve_until_stopped
from kvrelay.launcher.local.plan import Plan
from kvrelay.launcher.local.process import ComponentSpec

specs = [ComponentSpec(n, tuple(c), u, stop_rank=r, grace_s=120.0) for n, c, u, r in json.load(open(sys.argv[1]))]
plan = Plan(tuple(specs), "http://127.0.0.1:1", {spec.name: spec.ready_url for spec in specs})
try:
    sys.exit(serve_until_stopped(LocalDeployment(plan), ready_text(plan.url, "tiny", has_keys=False), hide_logs=False))
except KvrelayError as error:
    sys.exit(f"kvrelay: {error}")
"""


@contextlib.contextmanager
def launched(specs: list[ComponentSpec], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """The launcher as a process. It is killed at the end of the block if it still runs."""
    file = folder / "specs.json"
    file.write_text(json.dumps([(spec.name, spec.command, spec.ready_url, spec.stop_rank) for spec in specs]))
    with subprocess.Popen(
        [sys.executable, "-P", "-c", LAUNCHER, str(file)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until_ready(process: subprocess.Popen[str], num_components: int) -> str:
    """The output up to where the launcher is ready and each component has told its process id, in any order."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if "is ready at" in seen and len(pids_in(seen)) == num_components:
            return seen
    raise AssertionError(f"not ready, or not all have told their ids:\n{seen}")


def rest_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.read()


def pids_in(output: str) -> list[int]:
    return [int(pid) for pid in re.findall(r"runs as (\d+)", output)]


def wait_gone(pids: list[int]) -> None:
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            ended, _, _ = select.select([descriptor], [], [], 20)
            assert ended, f"process {pid} still runs"
        finally:
            os.close(descriptor)


def test_local_has_its_components(make_spec: MakeSpec, tmp_path: Path) -> None:
    specs = [make_spec("decode-0", stop_rank=2), make_spec("gateway")]
    with launched(specs, tmp_path) as process:
        output = read_until_ready(process, 2)
        pids = pids_in(output)
        assert re.search(r"kvrelay   \| decode-0: ready after \d+\.\d s \(\d+ MiB\)", output)
        assert "decode-0  | decode-0 runs as" in output
        process.send_signal(signal.SIGINT)
        output = rest_of(process)
        assert process.wait(20) == 0
    assert "curl http://127.0.0.1:1/v1/chat/completions" in output
    assert output.index("gateway: stopped") < output.index("decode-0: stopped") < output.index("all processes have")
    wait_gone(pids)
    assert (tmp_path / "stopped").read_text().split() == ["gateway", "decode-0"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_stop_in_order_too(number: signal.Signals, make_spec: MakeSpec, tmp_path: Path) -> None:
    with launched([make_spec("gateway")], tmp_path) as process:
        pids = pids_in(read_until_ready(process, 1))
        process.send_signal(number)
        assert "all processes have ended" in rest_of(process)
        assert process.wait(20) == 0
    wait_gone(pids)


def test_a_second_ctrl_c_does_not_wait_for_the_grace(make_spec: MakeSpec, tmp_path: Path) -> None:
    with launched([make_spec("decode-0", "stubborn")], tmp_path) as process:
        pids = pids_in(read_until_ready(process, 1))
        process.send_signal(signal.SIGINT)
        # The component got SIGTERM, so the launcher is handling the first Ctrl-C.
        while not (tmp_path / "stopped").exists():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0, "the grace is longer"
    wait_gone(pids)


def test_a_killed_launcher_takes_everything_with_it(make_spec: MakeSpec, tmp_path: Path) -> None:
    specs = [make_spec("decode-0"), make_spec("prefill-0"), make_spec("gateway", "stubborn")]
    with launched(specs, tmp_path) as process:
        pids = pids_in(read_until_ready(process, 3))
        process.kill()
        process.wait(20)
        wait_gone(pids)
    for spec in specs:
        check_free("127.0.0.1", int(spec.command[4]))


def test_a_death_at_start_is_told_and_ends_with_1(make_spec: MakeSpec, tmp_path: Path) -> None:
    with launched([make_spec("gateway"), make_spec("prefill-0", "dies at start")], tmp_path) as process:
        output = rest_of(process)
        assert process.wait(20) == 1
    assert "kvrelay: prefill-0 died at start (exit code 3); its last lines:" in output
    assert output.count("the reason: no such weights") == 2, "in the log, and in the reason"
    assert "gateway: stopped" in output
    wait_gone(pids_in(output))


def test_a_port_that_is_taken_is_told_before_the_model_loads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "kvrelay.launcher.local.deployment.resolve_model", lambda *_, **__: pytest.fail("the model is loaded")
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.run(["local", "--port", str(port)]) == 1
    message = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in message
    assert "choose another port with --port" in message


def test_an_address_of_another_machine() -> None:
    with pytest.raises(
        PortTakenError, match=r"cannot listen on 192\.0\.2\.1:8000: .*choose an address of this machine"
    ):
        check_free("192.0.2.1", 8000)


def test_free_ports_differ_and_are_free() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert ports[1] not in free_ports(50, without=ports[1])
    assert all(check_free("127.0.0.1", port) == port for port in ports)


def test_a_component_hears_of_no_variable(make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KVRELAY_CONFIG of the launcher is not passed on, as its file has options that a component would refuse."""
    monkeypatch.setenv("KVRELAY_CONFIG", "/launcher.toml")
    spec = make_spec("gateway")
    tell = "import os, sys; print([name for name in os.environ if name.startswith('KVRELAY')]); sys.exit(3)"
    told = replace(spec, command=(sys.executable, "-I", "-c", tell))
    with launched([told], tmp_path) as process:
        assert "gateway   | []" in rest_of(process)


def test_the_banners_command_says_what_keys_and_certificates_need() -> None:
    plain = ready_text("http://127.0.0.1:8000", "it's", has_keys=False)
    (command,) = re.findall(r"curl .*", plain, flags=re.DOTALL)
    words = shlex.split(command)
    assert json.loads(words[words.index("-d") + 1])["model"] == "it's"
    assert "-k" not in words
    secure = shlex.split(ready_text("https://127.0.0.1:8000", "m", has_keys=True).partition("\n\n  ")[2])
    assert "-k" in secure
    assert "Authorization: Bearer $API_KEY" in secure
    plain = ready_text("http://127.0.0.1:8000", "m", has_keys=False, chats=False)  # no chat template
    assert re.search(r"/v1/completions .*\"prompt\": ", plain, re.DOTALL)
