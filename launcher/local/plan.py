"""Which processes a local deployment consists of: a pure function of settings, directory and ports.

    gateway ──tcp──▶ prefill-0 … ──tcp: control, KV blocks──▶ decode-0 … ◀──tcp── gateway

Everything listens on loopback only, except the HTTP API if --host says so.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvrelay.decode_worker.settings import DecodeSettings
from kvrelay.gateway.settings import GatewaySettings
from kvrelay.launcher.local.gpus import VISIBLE, WorkerRanks, assigned, memory_fractions, who_has_which
from kvrelay.launcher.local.process import ComponentSpec
from kvrelay.launcher.models import with_directories
from kvrelay.launcher.options import command_line
from kvrelay.launcher.settings import LocalSettings, options_for
from kvrelay.prefill_worker.settings import PrefillSettings

_LOOPBACK = "127.0.0.1"
_KILL_AFTER_DRAIN_S = 5.0  # what a component may take to end after its drain time
_GPU_SHARE = 0.9  # of a GPU that one or two workers share …
_CUDA_SHARE = 0.03  # … less what CUDA itself takes for each further one: half a gigabyte, and the smallest GPUs have 16
_PREFILL_PARTS, _DECODE_PARTS = 4, 5  # of that, by worker
_SMALLEST_SHARE = 0.01  # that the setting takes
_ROLES = {"prefill": PrefillSettings, "decode": DecodeSettings}  # in the order in which they are planned, and stopped


@dataclass(frozen=True, slots=True)
class WorkerPorts:
    """Loopback ports of one worker."""

    control: int
    admin: int
    data: int | None = None  # of a decode worker


@dataclass(frozen=True, slots=True)
class _GpuShare:
    """What a worker may have of GPUs."""

    memory_fraction: float
    gpus: tuple[str, ...] = ()  # empty: those that the launcher sees


@dataclass(frozen=True, slots=True)
class Plan:
    """The processes, and where they are reached."""

    specs: tuple[ComponentSpec, ...]
    url: str  # of the HTTP API
    admin_urls: dict[str, str]  # of each component: /health, /metrics; of workers also /debug/kv
    model_names: tuple[str, ...] = ()  # in the API
    gpus: str = ""  # which worker has which, for people; empty with one or none


def num_ports(settings: LocalSettings) -> int:
    """How many loopback ports the workers need."""
    return len(settings.gateway.model) * (2 * settings.deployment.prefill + 3 * settings.deployment.decode)


def gpu_shares(num_prefill: int, num_decode: int) -> tuple[float, float]:
    """What each prefill and each decode worker may have of the memory of a GPU that all of them share.

    A prefill worker's pool holds prompts in progress and the prefix cache, a decode worker's all that is being generated: it
    gets more. Not much more of the whole, as the weights are in both shares: with 0.4 and 0.5, and weights of a fifth of the GPU,
    the pools are as two to three; of a third, as two to five. With 0.3 and 0.6, weights of a third would not even fit the smaller.
    """
    total = max(_SMALLEST_SHARE, _GPU_SHARE - _CUDA_SHARE * max(0, num_prefill + num_decode - 2))
    unit = total / max(1, _PREFILL_PARTS * num_prefill + _DECODE_PARTS * num_decode)
    prefill, decode = (
        max(_SMALLEST_SHARE, math.floor(1000 * parts * unit) / 1000) for parts in (_PREFILL_PARTS, _DECODE_PARTS)
    )
    return prefill, decode


def plan_deployment(
    settings: LocalSettings,
    *model_directories: Path,
    http_port: int,
    ports: Sequence[int],
    num_cores: int,
    gpus: Sequence[str] = (),
) -> Plan:
    """The processes of ``settings``: workers of each model, and one gateway.

    ``model_directories``: of the models, in the order of ``--model``. ``ports`` are free loopback ports, :func:`num_ports` of them.
    ``gpus``: those that workers may have; with fewer than two there is nothing to choose.
    Raises SettingsError on models that cannot be told apart.
    """
    deployment = settings.deployment
    front = with_directories(settings.gateway, model_directories)
    served = replace(settings.gateway, **front)
    names = [model.name for model in served.named_models()]
    served.aliases_of(names)
    adapters = served.adapters_of(names)
    free = iter(ports)
    specs: list[ComponentSpec] = []
    addresses: dict[str, list[str]] = {role: [] for role in _ROLES}
    workers = [
        (model, directory, WorkerRanks(_worker_name(role, names, model, index), role, math.prod(ranks.values())))
        for role in _ROLES
        for ranks in [_ranks(settings, role)]
        for index, (model, directory) in enumerate(
            pair
            for pair in zip(names, model_directories, strict=True)
            for _ in range(deployment.prefill if role == "prefill" else deployment.decode)
        )
    ]
    shares = _gpu_shares(settings, [worker for _, _, worker in workers], gpus)
    for model, directory, worker in workers:
        places = WorkerPorts(next(free), next(free), next(free) if worker.role == "decode" else None)
        of_model = {"model": str(directory), "served_model_name": model, "adapters": adapters.get(model)}
        specs.append(_worker(settings, worker, places, of_model, shares[worker.name], num_cores))
        address = _tcp(places.control)
        addresses[worker.role].append(address if len(names) == 1 else f"{model}={address}")
    scheme = "http" if settings.gateway.tls.tls_cert is None else "https"
    url = f"{scheme}://{_reachable(settings.gateway.host)}:{http_port}"
    chosen = {
        **settings.components,
        **front,
        "drain_s": deployment.drain_s,
        "port": http_port,
        "prefill_workers": addresses["prefill"],
        "decode_workers": addresses["decode"],
    }
    gateway = ComponentSpec(
        name="gateway",
        command=_command("gateway", GatewaySettings, chosen),
        ready_url=f"{url}/health/ready",
        stop_rank=0,
        grace_s=deployment.drain_s + _KILL_AFTER_DRAIN_S,
    )
    admin_urls = {spec.name: spec.ready_url.removesuffix("/health/ready") for spec in [*specs, gateway]}
    having = {worker.name: shares[worker.name].gpus for _, _, worker in workers if shares[worker.name].gpus}
    line = who_has_which(having) if having else ""
    return Plan(specs=(*specs, gateway), url=url, admin_urls=admin_urls, model_names=tuple(names), gpus=line)


def _worker_name(role: str, models: Sequence[str], model: str, index: int) -> str:
    """Of several models, a process is called by its model, too."""
    return "-".join([role, *([model.rpartition("/")[2]] if len(models) > 1 else []), str(index)])


def _ranks(settings: LocalSettings, role: str) -> dict[str, int]:
    """What cuts a worker's model, as far as it was asked for."""
    deployment = settings.deployment
    own = {
        "prefill": (deployment.prefill_tensor_parallel, deployment.prefill_pipeline_parallel),
        "decode": (deployment.decode_tensor_parallel, deployment.decode_pipeline_parallel),
    }[role]
    names = ("tensor_parallel", "pipeline_parallel")
    asked = {
        name: settings.components.get(name) if of_role is None else of_role
        for name, of_role in zip(names, own, strict=True)
    }
    return {name: number for name, number in asked.items() if number is not None}


def _gpu_shares(settings: LocalSettings, workers: Sequence[WorkerRanks], gpus: Sequence[str]) -> dict[str, _GpuShare]:
    if len(gpus) > 1:
        chosen = assigned(gpus, workers)
        fractions = memory_fractions(chosen, workers, gpu_shares)
        return {name: _GpuShare(fractions[name], its) for name, its in chosen.items()}
    roles = [worker.role for worker in workers]
    shares = dict(zip(_ROLES, gpu_shares(roles.count("prefill"), roles.count("decode")), strict=True))
    return {worker.name: _GpuShare(shares[worker.role]) for worker in workers}


def _worker(
    settings: LocalSettings,
    worker: WorkerRanks,
    ports: WorkerPorts,
    of_model: Mapping[str, str | None],
    share: _GpuShare,
    num_cores: int,
) -> ComponentSpec:
    deployment, role = settings.deployment, worker.role
    num_workers = len(settings.gateway.model) * (deployment.prefill + deployment.decode)
    threads = deployment.threads or max(1, num_cores // num_workers)
    chosen = {
        "kv_memory_fraction": share.memory_fraction,
        **settings.components,
        **of_model,
        "drain_s": deployment.drain_s,
        "threads": threads,
        "admin_host": _LOOPBACK,
        **_ranks(settings, role),
        **_places(worker.name, ports),
    }
    return ComponentSpec(
        name=worker.name,
        command=_command(f"{role}-worker", _ROLES[role], chosen),
        ready_url=f"http://{_LOOPBACK}:{ports.admin}/health/ready",
        stop_rank=1 + list(_ROLES).index(role),
        grace_s=deployment.drain_s + _KILL_AFTER_DRAIN_S,
        # Torch starts one OpenMP thread per core before --threads is read; several workers would fight for the cores.
        environment={
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            **({VISIBLE: ",".join(share.gpus)} if share.gpus else {}),
        },
    )


def _places(name: str, ports: WorkerPorts) -> dict[str, Any]:
    places: dict[str, Any] = {"address": _tcp(ports.control), "admin_port": ports.admin, "worker_id": name}
    if ports.data is not None:
        places["data_address"] = _tcp(ports.data)
    return places


def _command(name: str, component: type, values: Mapping[str, Any]) -> tuple[str, ...]:
    # -P: the working directory must not come before the installed packages.
    arguments = command_line(component, options_for(component, values))
    return (sys.executable, "-P", "-m", "kvrelay.launcher", name, *arguments)


def _tcp(port: int) -> str:
    return f"tcp://{_LOOPBACK}:{port}"


def _reachable(host: str) -> str:
    """An address for clients on this machine."""
    if host in ("0.0.0.0", "::", ""):
        return _LOOPBACK
    return f"[{host}]" if ":" in host else host
