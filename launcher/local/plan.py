"""Plans the processes of a local deployment: a pure function of settings, directories, ports and GPUs.

    gateway ──tcp──▶ prefill-0 … ──tcp: control, KV blocks──▶ decode-0 … ◀──tcp── gateway

All processes listen only on loopback, except the HTTP API if --host says so.
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
_KILL_AFTER_DRAIN_S = 5.0  # time to end after the drain time, before it is killed
_GPU_SHARE = 0.9  # a GPU's memory for its workers together
_CUDA_SHARE = 0.03  # less for each worker after the second: CUDA takes half a gigabyte
_PREFILL_PARTS, _DECODE_PARTS = 4, 5  # how the workers split it
_SMALLEST_SHARE = 0.01  # least value of the setting
_ROLES = {"prefill": PrefillSettings, "decode": DecodeSettings}  # in the order of planning and stopping


@dataclass(frozen=True, slots=True)
class WorkerPorts:
    """Loopback ports of one worker."""

    control: int
    admin: int
    data: int | None = None  # decode workers only


@dataclass(frozen=True, slots=True)
class _GpuShare:
    """The GPUs and the memory of them that a worker may use."""

    memory_fraction: float
    gpus: tuple[str, ...] = ()  # empty: all that the launcher sees


@dataclass(frozen=True, slots=True)
class Plan:
    """The processes and their URLs."""

    specs: tuple[ComponentSpec, ...]
    url: str  # of the HTTP API
    admin_urls: dict[str, str]  # by component name: base URL of /health, /metrics and (workers) /debug/kv
    model_names: tuple[str, ...] = ()  # in the API
    gpus: str = ""  # a line about who has which GPU; empty with fewer than two GPUs


def num_ports(settings: LocalSettings) -> int:
    """The number of loopback ports that the workers need."""
    return len(settings.gateway.model) * (2 * settings.deployment.prefill + 3 * settings.deployment.decode)


def gpu_shares(num_prefill: int, num_decode: int) -> tuple[float, float]:
    """The memory fraction for each prefill and each decode worker on a GPU that all of them share.

    A prefill worker's pool holds prompts in progress and the prefix cache. A decode worker's pool holds all running sequences, so
    it gets more, but not much more, because both shares include the weights. With 0.4 and 0.5, weights of a fifth of the GPU leave
    pools of 2:3, and weights of a third 2:5. With 0.3 and 0.6, weights of a third would not fit the smaller share.
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

    ``model_directories``: in the order of ``--model``. ``ports``: :func:`num_ports` free loopback ports. ``gpus``: those that
    workers may use; fewer than two are not assigned. Raises SettingsError on models with ambiguous names.
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
    shares = _gpu_shares([worker for _, _, worker in workers], gpus)
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
    """A worker's name, such as ``prefill-0``. With several models it includes the model."""
    return "-".join([role, *([model.rpartition("/")[2]] if len(models) > 1 else []), str(index)])


def _ranks(settings: LocalSettings, role: str) -> dict[str, int]:
    """The tensor and pipeline parallel sizes of the role's workers, where they were asked for."""
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


def _gpu_shares(workers: Sequence[WorkerRanks], gpus: Sequence[str]) -> dict[str, _GpuShare]:
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
        "images": deployment.prefill == 0 if deployment.images is None else deployment.images,
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
        # Torch starts one OpenMP thread per core before the worker reads --threads. Several workers would compete for the cores.
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
    # -P: keeps the working directory out of the import path.
    arguments = command_line(component, options_for(component, values))
    return (sys.executable, "-P", "-m", "kvrelay.launcher", name, *arguments)


def _tcp(port: int) -> str:
    return f"tcp://{_LOOPBACK}:{port}"


def _reachable(host: str) -> str:
    """The address of ``host`` for clients on this machine."""
    if host in ("0.0.0.0", "::", ""):
        return _LOOPBACK
    return f"[{host}]" if ":" in host else host
