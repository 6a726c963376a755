"""Finds the workers through the Kubernetes API: the pods of a namespace that a label selector matches.

:meth:`Pods.follow` is finite. It lists the pods, then watches them until the API ends the watch, forgets the version (410), or is
away. :class:`Discovery` calls it again and again, on its own thread because the client library blocks. While the API is away, the
last known workers stay; the links to them show which of them really answer.

A worker is a pod with the label ``kvrelay.dev/role`` and a container port named ``control``. With several models, the label
``kvrelay.dev/model`` names the worker's. A worker takes requests while its pod is ready and not marked for deletion. It stays known
until the pod is gone or has ended, because its requests may still finish. A worker may have several pods of a StatefulSet, as many
as the label ``kvrelay.dev/nodes-per-worker`` says. Then the first pod is the worker, and the others run ranks for it. The same
holds for the first pod of a LeaderWorkerSet's group.

Discovery needs ``get``, ``list`` and ``watch`` on pods of one namespace, nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrelay.common.errors import SettingsError
from kvrelay.common.listening import host_port
from kvrelay.gateway.settings import DiscoverySettings
from kvrelay.gateway.workers.pool import FoundWorker, WorkerPool, static_workers
from kvrelay.wire.messages import Role

if TYPE_CHECKING:
    from kubernetes.client import CoreV1Api

logger = logging.getLogger(__name__)

OnWorkers = Callable[[Sequence[FoundWorker]], None]

ROLE_LABEL = "kvrelay.dev/role"
MODEL_LABEL = "kvrelay.dev/model"
NODES_LABEL = "kvrelay.dev/nodes-per-worker"
# A LeaderWorkerSet's pod has its index in the group here.
GROUP_INDEX_LABEL = "leaderworkerset.sigs.k8s.io/worker-index"
CONTROL_PORT = "control"

_ROLES = {role.value: role for role in (Role.PREFILL, Role.DECODE)}
_ENDED = ("Succeeded", "Failed")
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_CONNECT_S = 3.0
_LIST_S = 10.0
_WATCH_S = 30  # the server ends a watch after this, so a dead connection is noticed soon
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0
_STOP_S = 2.0  # how long to wait for the thread's end


class Pods:
    """The pods of one namespace that a selector matches."""

    def __init__(self, api: CoreV1Api, namespace: str, selector: str) -> None:
        from kubernetes.watch import Watch  # noqa: PLC0415 - 40 MB that only this needs

        self._api = api
        self._namespace = namespace
        self._selector = selector
        self._watch = Watch()

    @classmethod
    def connect(cls, namespace: str | None, selector: str) -> Pods:
        """Connect as the pod's service account, or outside of a cluster as ``KUBECONFIG`` says. Raises SettingsError."""
        from kubernetes import client, config  # noqa: PLC0415 - 40 MB that only this needs

        try:
            config.load_incluster_config()
        except config.ConfigException:
            try:
                config.load_kube_config()
            except config.ConfigException as error:
                raise SettingsError(
                    "--discovery is kubernetes, but this is no pod with a service account and KUBECONFIG names no cluster "
                    f"({error}); use --discovery static with --decode-workers"
                ) from error
        if namespace is None:
            namespace = _OWN_NAMESPACE.read_text().strip() if _OWN_NAMESPACE.exists() else "default"
        return cls(client.CoreV1Api(), namespace, selector)

    def follow(self, on_workers: OnWorkers, wait: Callable[[float], bool]) -> None:
        """List the pods, then watch them. ``on_workers`` gets all workers at first and after every change.

        Returns when a watch reports nothing new. ``wait`` sleeps for so many seconds between two watches, because an API may end a
        watch at once. It returns True to stop. Raises ApiException (of ``kubernetes``; 410: the version last seen is too old),
        urllib3's HTTPError, and OSError.
        """
        listed = self._api.list_namespaced_pod(
            self._namespace, label_selector=self._selector, _request_timeout=(_CONNECT_S, _LIST_S)
        )
        body = self._api.api_client.sanitize_for_serialization(listed)
        version = body["metadata"]["resourceVersion"]
        pods: dict[str, dict[str, Any]] = {pod["metadata"]["uid"]: pod for pod in body["items"]}
        known = workers_of(pods.values())
        on_workers(known)
        while True:
            before = version
            for event in self._watch.stream(
                self._api.list_namespaced_pod,
                self._namespace,
                label_selector=self._selector,
                resource_version=version,
                timeout_seconds=_WATCH_S,
                allow_watch_bookmarks=True,
                _request_timeout=(_CONNECT_S, _WATCH_S + _LIST_S),
            ):
                pod = event["raw_object"]
                version = pod["metadata"]["resourceVersion"]
                if event["type"] == "DELETED":
                    pods.pop(pod["metadata"]["uid"], None)
                elif event["type"] in ("ADDED", "MODIFIED"):
                    pods[pod["metadata"]["uid"]] = pod
                found = workers_of(pods.values())
                if found != known:
                    known = found
                    on_workers(found)
            if wait(_FIRST_PAUSE_S) or version == before:
                return  # without events the version gets too old; a new list is cheap then

    def stop(self) -> None:
        """End the running watch on another thread. A watch that begins later is not ended."""
        self._watch.stop()


class Discovery:
    """Follows the pods from ``start`` to ``stop`` on a daemon thread. Calls ``on_workers`` on the asyncio loop."""

    def __init__(self, pods: Pods, on_workers: OnWorkers) -> None:
        self._loop = asyncio.get_running_loop()
        self._pods = pods
        self._on_workers = on_workers
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="discovery", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop reporting, and wait for the thread's end. A thread that waits for a list of the API outlives this call."""
        self._ended.set()
        until_s = time.monotonic() + _STOP_S
        while self._thread.is_alive() and time.monotonic() < until_s:
            self._pods.stop()  # again, because a watch may have begun since
            self._thread.join(0.05)

    def _run(self) -> None:
        from kubernetes.client import ApiException  # noqa: PLC0415
        from urllib3.exceptions import HTTPError  # noqa: PLC0415

        pause_s, was_away = _FIRST_PAUSE_S, False

        def report(found: Sequence[FoundWorker]) -> None:
            nonlocal pause_s, was_away
            if was_away:
                logger.info("the Kubernetes API is back")
            pause_s, was_away = _FIRST_PAUSE_S, False
            if not self._ended.is_set():
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(self._on_workers, found)

        while not self._ended.is_set():
            try:
                self._pods.follow(report, self._ended.wait)
                continue
            except (ApiException, HTTPError, OSError) as error:
                if isinstance(error, ApiException) and error.status == 410:
                    logger.info("listing the workers' pods anew: the version last seen is too old")
                else:
                    if not was_away:
                        text = "the Kubernetes API is away (%.200s); going on with the workers last known"
                        logger.warning(
                            text, f"{error.status} {error.reason}" if isinstance(error, ApiException) else error
                        )
                    was_away = True
            except Exception:
                logger.exception("discovery failed; it tries again")
            self._ended.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


@contextlib.asynccontextmanager
async def followed(
    settings: DiscoverySettings, pods: Pods | None, pools: Mapping[str, WorkerPool]
) -> AsyncGenerator[None]:
    """A context in which ``pools`` (by model) get the workers of ``pods`` as they come and go; without pods, the listed workers.

    At the end it stops the pools.
    """
    share_out = Sharing(pools)
    if pods is None:
        share_out(static_workers(settings.prefill_workers, settings.decode_workers))
        yield
    else:
        discovery = Discovery(pods, share_out)
        discovery.start()
        yield
        await asyncio.to_thread(discovery.stop)
    await asyncio.gather(*(pool.stop() for pool in pools.values()))


class Sharing:
    """Gives each pool the workers of its model.

    A worker without a model's name belongs to the only model; if there are several, to none.
    """

    def __init__(self, pools: Mapping[str, WorkerPool]) -> None:
        self._pools = pools
        self._foreign: frozenset[str] = frozenset()  # models that workers name and this gateway does not serve

    def __call__(self, found: Sequence[FoundWorker]) -> None:
        """Take the list of all workers."""
        only = next(iter(self._pools)) if len(self._pools) == 1 else ""
        for model, pool in self._pools.items():
            pool.update([worker for worker in found if (worker.model or only) == model])
        foreign = frozenset(worker.model for worker in found) - self._pools.keys() - ({""} if only else set())
        if foreign - self._foreign:
            logger.warning(
                "workers are not used whose label %s is none of %s: %s",
                MODEL_LABEL, ", ".join(map(repr, self._pools)), ", ".join(map(repr, sorted(foreign))),
            )  # fmt: skip
        self._foreign = foreign


def worker_of(pod: dict[str, Any]) -> FoundWorker | None:
    """The worker of a pod; None if the pod is no worker, or not yet, or no more."""
    metadata, status = pod["metadata"], pod.get("status", {})
    labels = metadata.get("labels", {})
    role = _ROLES.get(labels.get(ROLE_LABEL, ""))
    host, port = status.get("podIP"), _control_port(pod)
    if (
        role is None
        or not _is_leader(metadata.get("name", ""), labels)
        or not host
        or port is None
        or status.get("phase") in _ENDED
    ):
        return None
    is_ready = any(
        condition["type"] == "Ready" and condition["status"] == "True" for condition in status.get("conditions", [])
    )
    return FoundWorker(
        role=role,
        address=f"tcp://{host_port(host, port)}",
        uid=metadata["uid"],
        accepts=is_ready and "deletionTimestamp" not in metadata,
        model=labels.get(MODEL_LABEL, ""),
    )


def workers_of(pods: Iterable[dict[str, Any]]) -> list[FoundWorker]:
    """The workers of pods, one for each address. A pod that is ending may still show an address that another pod already has."""
    found: dict[tuple[Role, str], FoundWorker] = {}
    for pod in pods:
        worker = worker_of(pod)
        if worker is None:
            continue
        key = (worker.role, worker.address)
        if key not in found or worker.accepts:
            found[key] = worker
    return list(found.values())


def _is_leader(name: str, labels: Mapping[str, str]) -> bool:
    """Whether the pod is the worker, not one of the worker's further pods."""
    if (index := labels.get(GROUP_INDEX_LABEL)) is not None:
        return index == "0"
    nodes_per_worker, ordinal = labels.get(NODES_LABEL, "1"), name.rpartition("-")[2]
    if not (nodes_per_worker.isdecimal() and ordinal.isdecimal()):
        return nodes_per_worker == "1"
    return int(ordinal) % max(1, int(nodes_per_worker)) == 0


def _control_port(pod: dict[str, Any]) -> int | None:
    ports = [port for container in pod.get("spec", {}).get("containers", []) for port in container.get("ports", [])]
    return next((port["containerPort"] for port in ports if port.get("name") == CONTROL_PORT), None)
