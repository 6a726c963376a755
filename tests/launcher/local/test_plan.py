"""The plan of ``kvrelay local``: which components run, with which options, ports and shares of the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import click
import pytest

from kvrelay.common.errors import SettingsError
from kvrelay.decode_worker.settings import DecodeSettings
from kvrelay.gateway.settings import GatewaySettings
from kvrelay.launcher.local.plan import Plan, gpu_shares, num_ports, plan_deployment
from kvrelay.launcher.local.process import ComponentSpec
from kvrelay.launcher.options import Options
from kvrelay.launcher.settings import LOCAL, LocalSettings
from kvrelay.prefill_worker.settings import PrefillSettings

T = TypeVar("T")


def planned(settings: LocalSettings) -> Plan:
    ports = list(range(20_000, 20_000 + num_ports(settings)))
    return plan_deployment(settings, Path("/models/tiny"), http_port=8000, ports=ports, num_cores=8)


def parsed(cls: type[T], spec: ComponentSpec) -> T:
    """The settings that the component's process reads from its command line."""
    options = Options.of(cls)
    command = click.Command("component", params=options.parameters())
    context = command.make_context("component", list(spec.command[5:]))
    settings = options.load(context.params, {})
    assert isinstance(settings, cls)
    return settings


def both(plan: Plan) -> tuple[PrefillSettings, DecodeSettings]:
    """The settings of the first worker of each pool."""
    prefill = next(spec for spec in plan.specs if spec.name.startswith("prefill"))
    decode = next(spec for spec in plan.specs if spec.name.startswith("decode"))
    return parsed(PrefillSettings, prefill), parsed(DecodeSettings, decode)


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
    prefill, decode = both(planned(LocalSettings.of(model="/models/tiny", **given)))
    assert (prefill.model.tensor_parallel, decode.model.tensor_parallel) == expected


def test_workers_hear_of_ranks_only_if_somebody_asked_for_some() -> None:
    plan = planned(LocalSettings.of(model="/models/tiny"))
    assert not any("-parallel=" in argument for spec in plan.specs for argument in spec.command)
    plan = planned(LocalSettings.of(model="/models/tiny", decode_tensor_parallel=1))
    told = [[argument for argument in spec.command if "-parallel=" in argument] for spec in plan.specs]
    assert told == [[], ["--tensor-parallel=1"], []]


def test_each_pool_has_its_stages() -> None:
    settings = LocalSettings.of(model="/models/tiny", pipeline_parallel=2, decode_pipeline_parallel=3)
    prefill, decode = both(planned(settings))
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
    assert (first.worker_id, second.worker_id) == ("prefill-0", "prefill-1")
    assert first.address != second.address
    assert (first.model.model, first.model.threads) == ("/models/tiny", 2)  # 8 cores, 3 workers
    assert first.scheduler.max_batched_tokens == 256
    assert first.scheduler.ttft_budget_ms == 250
    assert prefill_0.ready_url == f"http://127.0.0.1:{first.admin_port}/health/ready"
    assert prefill_0.environment["OMP_NUM_THREADS"] == "2"

    decode = parsed(DecodeSettings, decode_0)
    assert len({decode.address, decode.data_address, first.address, second.address}) == 4

    front = parsed(GatewaySettings, gateway)
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
    assert (prefill.model.model, prefill.served_model_name, prefill.model.threads) == ("/models/a", "small", 2)
    assert (decode.model.model, decode.served_model_name) == ("/cache/b", "org/b")
    assert (prefill.model.adapters, decode.model.adapters) == (None, "/lora")
    front = parsed(GatewaySettings, plan.specs[-1])
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
    prefill, decode = both(plan)
    front = parsed(GatewaySettings, plan.specs[3])
    assert (prefill.scheduler.max_num_seqs, decode.scheduler.max_num_seqs, decode.scheduler.lease_ttl_s) == (8, 8, 2.5)
    assert (prefill.scheduler.max_waiting, decode.drain_s) == (512, 5.0)
    assert (front.served_model_name, front.api_keys, front.tls.tls_cert) == ("small", "/keys", "/c")
    assert plan.url.startswith("https://")
    assert plan.specs[3].ready_url == f"{plan.url}/health/ready"


def test_workers_of_one_gpu_have_shares_of_all_of_it_by_their_needs() -> None:
    assert gpu_shares(1, 1) == (0.4, 0.5)
    assert gpu_shares(0, 1)[1] == 0.9
    for num_prefill, num_decode in ((1, 1), (2, 1), (1, 3), (0, 4)):
        prefill, decode = gpu_shares(num_prefill, num_decode)
        assert prefill < decode
        total = num_prefill * prefill + num_decode * decode
        # CUDA itself takes some of the rest for each process.
        assert 0.82 < total <= 0.9601 - 0.03 * (num_prefill + num_decode)
    first, second = both(planned(LocalSettings.of(model="/models/tiny")))
    assert (first.kv.kv_memory_fraction, second.kv.kv_memory_fraction) == (0.4, 0.5)
    assert (first.scheduler.max_batched_tokens, second.scheduler.max_batched_tokens) == (None, None)
    most = planned(LocalSettings.of(prefill=64, decode=64))  # for fake engines, any share works
    assert isinstance(parsed(PrefillSettings, most.specs[0]), PrefillSettings)


def test_a_colocated_plan_has_no_prefill_workers() -> None:
    plan = planned(LocalSettings.of(prefill=0, decode=2))
    assert [spec.name for spec in plan.specs] == ["decode-0", "decode-1", "gateway"]
    front = parsed(GatewaySettings, plan.specs[-1])
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
    assert decode.images is reads_images


def test_an_api_for_all_addresses_is_asked_on_this_one() -> None:
    assert planned(LocalSettings.of(host="0.0.0.0")).url == "http://127.0.0.1:8000"
    assert planned(LocalSettings.of(host="::1")).url == "http://[::1]:8000"
