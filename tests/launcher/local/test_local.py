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
from typing import Any

import click
import pytest

from kvrelay.common.errors import SettingsError
from kvrelay.decode_worker.settings import DecodeSettings
from kvrelay.gateway.settings import GatewaySettings
from kvrelay.launcher import cli
from kvrelay.launcher.errors import PortTakenError
from kvrelay.launcher.local.deployment import ready_text
from kvrelay.launcher.local.plan import Plan, gpu_shares, num_ports, plan_deployment
from kvrelay.launcher.local.ports import check_free, free_ports
from kvrelay.launcher.local.process import ComponentSpec
from kvrelay.launcher.options import Options
from kvrelay.launcher.settings import LOCAL, LocalSettings
from kvrelay.prefill_worker.settings import PrefillSettings
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


def planned(settings: LocalSettings) -> Plan:
    ports = list(range(20_000, 20_000 + num_ports(settings)))
    return plan_deployment(settings, Path("/models/tiny"), http_port=8000, ports=ports, num_cores=8)


def parsed(cls: type, spec: ComponentSpec) -> object:
    """The settings that the component's process reads from its command line."""
    options = Options.of(cls)
    command = click.Command("component", params=options.parameters())
    context = command.make_context("component", list(spec.command[5:]))
    return options.load(context.params, {})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (1, 1)),
        ({"tensor_parallel": 3}, (3, 3)),
        ({"prefill_tensor_parallel": 1, "decode_tensor_parallel": 3}, (1, 3)),
        ({"tensor_parallel": 3, "prefill_tensor_parallel": 1}, (1, 3)),
    ],
)
def test_each_pool_has_its_ranks(given: dict[str, int], expected: tuple[int, int]) -> None:
    plan = planned(LocalSettings.of(model="/models/tiny", **given))
    prefill, decode = parsed(PrefillSettings, plan.specs[0]), parsed(DecodeSettings, plan.specs[1])
    assert isinstance(prefill, PrefillSettings)
    assert isinstance(decode, DecodeSettings)
    assert (prefill.model.tensor_parallel, decode.model.tensor_parallel) == expected


def test_workers_hear_of_ranks_only_if_somebody_asked_for_some() -> None:
    plan = planned(LocalSettings.of(model="/models/tiny"))
    assert not any("-parallel=" in argument for spec in plan.specs for argument in spec.command)
    plan = planned(LocalSettings.of(model="/models/tiny", decode_tensor_parallel=1))
    told = [[argument for argument in spec.command if "-parallel=" in argument] for spec in plan.specs]
    assert told == [[], ["--tensor-parallel=1"], []]


def test_each_pool_has_its_stages() -> None:
    plan = planned(LocalSettings.of(model="/models/tiny", pipeline_parallel=2, decode_pipeline_parallel=3))
    prefill, decode = parsed(PrefillSettings, plan.specs[0]), parsed(DecodeSettings, plan.specs[1])
    assert isinstance(prefill, PrefillSettings)
    assert isinstance(decode, DecodeSettings)
    assert (prefill.model.pipeline_parallel, decode.model.pipeline_parallel) == (2, 3)
    assert decode.model.num_ranks == 3


def test_a_plan_wires_the_components_together() -> None:
    settings = LocalSettings.of(
        model="/models/tiny", prefill=2, decode=1, max_batched_tokens=256, ttft_budget_ms=250, log_level="error"
    )
    plan = planned(settings)
    assert list(plan.admin_urls) == ["prefill-0", "prefill-1", "decode-0", "gateway"]
    assert plan.url == plan.admin_urls["gateway"] == "http://127.0.0.1:8000"
    prefill_0, prefill_1, decode_0, gateway = plan.specs
    assert [spec.stop_rank for spec in plan.specs] == [1, 1, 2, 0]

    first, second = parsed(PrefillSettings, prefill_0), parsed(PrefillSettings, prefill_1)
    assert isinstance(first, PrefillSettings)
    assert isinstance(second, PrefillSettings)
    assert (first.worker_id, second.worker_id) == ("prefill-0", "prefill-1")
    assert first.address != second.address
    assert (first.model.model, first.model.threads) == ("/models/tiny", 2)  # 8 cores, 3 workers
    assert first.scheduler.max_batched_tokens == 256
    assert first.scheduler.ttft_budget_ms == 250
    assert prefill_0.ready_url == f"http://127.0.0.1:{first.admin_port}/health/ready"
    assert prefill_0.environment["OMP_NUM_THREADS"] == "2"

    decode = parsed(DecodeSettings, decode_0)
    assert isinstance(decode, DecodeSettings)
    assert len({decode.address, decode.data_address, first.address, second.address}) == 4

    front = parsed(GatewaySettings, gateway)
    assert isinstance(front, GatewaySettings)
    assert front.workers.prefill_workers == (first.address, second.address)
    assert front.workers.decode_workers == (decode.address,)
    assert (front.port, front.log_level) == (8000, "error")


def test_each_of_several_models_has_its_workers() -> None:
    flags = {"model": ("small=/models/a", "org/b"), "alias": ("chat=small:9+org/b:1",), "prefill": "1", "decode": "2"}
    settings = LOCAL.load({**flags, "adapters": ("org/b=/lora",)}, {})
    ports = list(range(20_000, 20_000 + num_ports(settings)))
    assert len(ports) == 2 * (2 + 3 + 3)
    plan = plan_deployment(settings, Path("/models/a"), Path("/cache/b"), http_port=8000, ports=ports, num_cores=12)
    assert list(plan.admin_urls) == [
        "prefill-small-0", "prefill-b-1", "decode-small-0", "decode-small-1", "decode-b-2", "decode-b-3", "gateway"
    ]  # fmt: skip
    assert plan.model_names == ("small", "org/b")
    prefill, decode = parsed(PrefillSettings, plan.specs[0]), parsed(DecodeSettings, plan.specs[4])
    assert isinstance(prefill, PrefillSettings)
    assert isinstance(decode, DecodeSettings)
    assert (prefill.model.model, prefill.served_model_name, prefill.model.threads) == ("/models/a", "small", 2)
    assert (decode.model.model, decode.served_model_name) == ("/cache/b", "org/b")
    assert (prefill.model.adapters, decode.model.adapters) == (None, "/lora")
    front = parsed(GatewaySettings, plan.specs[-1])
    assert isinstance(front, GatewaySettings)
    assert front.model == ("small=/models/a", "org/b=/cache/b")
    assert front.adapters == ("org/b=/lora",)
    assert front.workers.prefill_workers[0] == f"small={prefill.address}"
    assert front.workers.decode_workers[2] == f"org/b={decode.address}"
    assert [alias.name for alias in front.aliases_of(plan.model_names)] == ["chat"]


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (["one/a", "two/a"], "two models have one name among a"),
        (
            ["one/a", "one/my model"],
            "'my model' cannot be the name of one of several models; write NAME=one/my model",
        ),
    ],
)
def test_models_that_cannot_be_told_apart_are_refused(
    model: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in model:
        Path(path).mkdir(parents=True)
    settings = LocalSettings.of(model=model)
    ports = list(range(20_000, 20_000 + num_ports(settings)))
    with pytest.raises(SettingsError, match=says):
        plan_deployment(settings, *map(Path, model), http_port=8000, ports=ports, num_cores=8)


def test_every_option_of_a_component_reaches_those_that_have_it(tmp_path: Path) -> None:
    """Options keep their names as flag, variable and key of the file. Options not given keep each component's
    default."""
    config = tmp_path / "kvrelay.toml"
    config.write_text("max_num_seqs = 8\nprefill = 2\n")
    flags = {"config_file": str(config), "served_model_name": "small", "api_keys": "/keys", "seal_kv": True}
    settings = LOCAL.load(flags, {"KVRELAY_LEASE_TTL_S": "2.5", "KVRELAY_TLS_CERT": "/c", "KVRELAY_TLS_KEY": "/k"})
    plan = planned(settings)
    assert [spec.name for spec in plan.specs] == ["prefill-0", "prefill-1", "decode-0", "gateway"]
    prefill, decode = parsed(PrefillSettings, plan.specs[0]), parsed(DecodeSettings, plan.specs[2])
    front = parsed(GatewaySettings, plan.specs[3])
    assert isinstance(prefill, PrefillSettings)
    assert isinstance(decode, DecodeSettings)
    assert isinstance(front, GatewaySettings)
    assert (prefill.scheduler.max_num_seqs, decode.scheduler.max_num_seqs, decode.scheduler.lease_ttl_s) == (8, 8, 2.5)
    assert (prefill.scheduler.max_waiting, decode.drain_s) == (512, 5.0)
    assert (front.served_model_name, front.api_keys, front.tls.tls_cert) == ("small", "/keys", "/c")
    assert plan.url.startswith("https://")
    assert plan.specs[3].ready_url == f"{plan.url}/health/ready"


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


def test_workers_of_one_gpu_have_shares_of_all_of_it_by_their_needs() -> None:
    assert gpu_shares(1, 1) == (0.4, 0.5)
    assert gpu_shares(0, 1)[1] == 0.9
    for num_prefill, num_decode in ((1, 1), (2, 1), (1, 3), (0, 4)):
        prefill, decode = gpu_shares(num_prefill, num_decode)
        assert prefill < decode
        total = num_prefill * prefill + num_decode * decode
        # CUDA itself takes some of the rest for each process.
        assert 0.82 < total <= 0.9601 - 0.03 * (num_prefill + num_decode)
    plan = planned(LocalSettings.of(model="/models/tiny"))
    first, second = parsed(PrefillSettings, plan.specs[0]), parsed(DecodeSettings, plan.specs[1])
    assert isinstance(first, PrefillSettings)
    assert isinstance(second, DecodeSettings)
    assert (first.kv.kv_memory_fraction, second.kv.kv_memory_fraction) == (0.4, 0.5)
    assert (first.scheduler.max_batched_tokens, second.scheduler.max_batched_tokens) == (None, None)
    most = planned(LocalSettings.of(prefill=64, decode=64))  # for fake engines, any share works
    assert isinstance(parsed(PrefillSettings, most.specs[0]), PrefillSettings)


def test_a_colocated_plan_has_no_prefill_workers() -> None:
    plan = planned(LocalSettings.of(prefill=0, decode=2))
    assert [spec.name for spec in plan.specs] == ["decode-0", "decode-1", "gateway"]
    front = parsed(GatewaySettings, plan.specs[-1])
    assert isinstance(front, GatewaySettings)
    assert front.workers.prefill_workers == ()


@pytest.mark.parametrize(
    ("options", "reads_images"),
    [
        ({"prefill": 0}, True),
        ({"prefill": 0, "images": False}, False),
        ({"prefill": 1}, False),
        ({"prefill": 1, "images": True}, True),
    ],
)
def test_decode_workers_read_images_if_nobody_else_does(options: dict[str, Any], reads_images: bool) -> None:
    plan = planned(LocalSettings.of(**options))
    [decode] = [parsed(DecodeSettings, spec) for spec in plan.specs if spec.name == "decode-0"]
    assert isinstance(decode, DecodeSettings)
    assert decode.images is reads_images


def test_an_api_for_all_addresses_is_asked_on_this_one() -> None:
    assert planned(LocalSettings.of(host="0.0.0.0")).url == "http://127.0.0.1:8000"
    assert planned(LocalSettings.of(host="::1")).url == "http://[::1]:8000"
