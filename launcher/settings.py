"""Settings of the launcher's own commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvrelay.common.settings import SettingInfo, build, check, describe, setting
from kvrelay.decode_worker.settings import DecodeSettings
from kvrelay.gateway.settings import GatewaySettings
from kvrelay.launcher.options import Options
from kvrelay.prefill_worker.settings import PrefillSettings

COMPONENTS = (DecodeSettings, PrefillSettings, GatewaySettings)
# Settings of components that ``kvrelay local`` does not take: it chooses their addresses and names itself.
CHOSEN = frozenset(
    {
        "address", "admin_host", "admin_port", "data_address", "decode_workers", "discovery", "leader_address", "namespace",
        "node_name", "node_rank", "nodes", "prefill_workers", "worker_id", "worker_selector",
    }
)  # fmt: skip
_OF_MODELS = frozenset({"adapters", "model"})  # a gateway takes values for several models, a worker for one


@dataclass(frozen=True, slots=True)
class DeploymentSettings:
    """What a deployment on this machine has beside the options of its components, or has by another default."""

    prefill: int = setting(
        1, "prefill workers; with 0 the decode workers prefill themselves (colocated)", minimum=0, maximum=64
    )
    decode: int = setting(1, "decode workers", minimum=1, maximum=64)
    prefill_tensor_parallel: int | None = setting(
        None, "--tensor-parallel of prefill workers alone", minimum=1, maximum=64
    )
    decode_tensor_parallel: int | None = setting(
        None, "--tensor-parallel of decode workers alone", minimum=1, maximum=64
    )
    prefill_pipeline_parallel: int | None = setting(
        None, "--pipeline-parallel of prefill workers alone", minimum=1, maximum=64
    )
    decode_pipeline_parallel: int | None = setting(
        None, "--pipeline-parallel of decode workers alone", minimum=1, maximum=64
    )
    images: bool | None = setting(
        None, "decode workers read the images of prompts; default: if there are no prefill workers"
    )
    threads: int | None = setting(
        None, "CPU threads of each worker; default: the cores divided by the workers", minimum=1, maximum=1024
    )
    drain_s: float = setting(5.0, "how long running requests may finish after Ctrl-C", unit="s", minimum=0)
    quiet: bool = setting(False, "hide the components' logs, except of one that died")


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """``kvrelay local``: one deployment on this machine. Every option of a component is one of it, but those in ``CHOSEN``."""

    deployment: DeploymentSettings
    gateway: GatewaySettings
    components: Mapping[str, Any]  # the given options of components; the others have each component's default

    @classmethod
    def of(cls, **values: Any) -> LocalSettings:
        """Make the settings from options by name. Raises SettingsError."""
        checked = check(local_infos(), values, source="settings")
        own = {info.name for info in describe(DeploymentSettings)}
        deployment = build(DeploymentSettings, {name: value for name, value in checked.items() if name in own})
        components = {name: value for name, value in checked.items() if name not in own and value is not None}
        gateway = build(GatewaySettings, options_for(GatewaySettings, components))
        of_workers = {name: value for name, value in components.items() if name not in _OF_MODELS}
        for component in (DecodeSettings, PrefillSettings):
            build(component, options_for(component, of_workers))
        return cls(deployment, gateway, components)


def options_for(component: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The part of ``values`` that are settings of ``component``."""
    names = {info.name for info in describe(component)}
    return {name: value for name, value in values.items() if name in names}


def local_infos() -> list[SettingInfo]:
    """All options of ``kvrelay local``: its own, then the components' but for ``CHOSEN``. If defaults differ, each component keeps
    its own.

    Options of models have the gateway's form, with values for several models. Each worker gets the value of its model.
    """
    found = {info.name: info for info in describe(DeploymentSettings)}
    own = frozenset(found)
    found |= {info.name: info for info in describe(GatewaySettings) if info.name in _OF_MODELS}
    for info in (info for component in COMPONENTS for info in describe(component)):
        if info.name in _OF_MODELS:
            continue
        first = found.setdefault(info.name, info)
        if info.name in own or first.default == info.default:
            continue
        defaults = [str(one.default) for one in (first, info) if one.default is not None]
        found[info.name] = replace(first, default=" or ".join(defaults), is_optional=True)
    return [info for name, info in found.items() if name not in CHOSEN]


LOCAL = Options(local_infos(), lambda values: LocalSettings.of(**values))


@dataclass(frozen=True, slots=True)
class VerifySettings:
    """``kvrelay verify``: is what we generate what the model says?"""

    model: str = setting("demo", "model directory, GGUF file, Hugging Face id, or 'demo'")
    dtype: str = setting(
        "float32",
        "number format of weights and KV, on both sides; with --url that of the deployment",
        choices=("bfloat16", "float16", "float32"),
    )
    prompts: str | None = setting(None, "JSON lines with a text 'prompt' each; default: 20 built-in prompts")
    max_tokens: int = setting(64, "tokens to generate for each prompt", unit="tokens", minimum=1)
    url: str | None = setting(None, "compare a running deployment, instead of starting two here")
    api_key: str | None = setting(
        None,
        "sent to the deployment at --url as a bearer token; better as KVRELAY_API_KEY: others on this machine see flags",
    )
    concurrency: int = setting(16, "requests at a time in the second pass", minimum=1, maximum=1024)
    device: str = setting(
        "auto",
        "where the model runs. auto: CUDA if there is a GPU, but with --url the CPU, because the deployment has the GPU",
        choices=("auto", "cpu", "cuda"),
    )
    backend: str = setting(
        "auto",
        "whose forward pass the deployments started here compute, as for a worker",
        choices=("auto", "native", "transformers"),
    )
    threads: int | None = setting(None, "CPU threads of each worker", minimum=1, maximum=1024)
    timeout_s: float = setting(600.0, "how long one request, or the start, may take", unit="s", minimum=1)
