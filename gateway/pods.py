"""What a pod tells a gateway of a worker: pure functions of Kubernetes objects, as plain JSON.

A worker is a pod with the label ``kvrelay.dev/role`` and a container port named ``control``. It takes requests while it is ready
and nobody has asked for its deletion; it stays known until it is gone or has ended, because what it has may still finish.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from kvrelay.gateway.workers import FoundWorker
from kvrelay.wire.messages import Role

logger = logging.getLogger(__name__)

ROLE_LABEL = "kvrelay.dev/role"
CONTROL_PORT = "control"

_ROLES = {role.value: role for role in (Role.PREFILL, Role.DECODE)}
_ENDED = ("Succeeded", "Failed")


def worker_of(pod: dict[str, Any]) -> FoundWorker | None:
    """The worker in a pod; None if there is none, or none yet, or not any more."""
    metadata, status = pod["metadata"], pod.get("status", {})
    role = _ROLES.get(metadata.get("labels", {}).get(ROLE_LABEL, ""))
    host, port = status.get("podIP"), _control_port(pod)
    if role is None or not host or port is None or status.get("phase") in _ENDED:
        return None
    is_ready = any(
        condition["type"] == "Ready" and condition["status"] == "True" for condition in status.get("conditions", [])
    )
    return FoundWorker(
        role=role,
        address=f"tcp://{f'[{host}]' if ':' in host else host}:{port}",
        uid=metadata["uid"],
        accepts=is_ready and "deletionTimestamp" not in metadata,
    )


def workers_of(pods: Iterable[dict[str, Any]]) -> list[FoundWorker]:
    """The workers in pods, one for each address: a pod that is going may still show the address that another has by now."""
    found: dict[tuple[Role, str], FoundWorker] = {}
    for pod in pods:
        worker = worker_of(pod)
        if worker is None:
            continue
        key = (worker.role, worker.address)
        if key not in found or worker.accepts:
            found[key] = worker
    return list(found.values())


def _control_port(pod: dict[str, Any]) -> int | None:
    for container in pod.get("spec", {}).get("containers", []):
        for port in container.get("ports", []):
            if port.get("name") == CONTROL_PORT:
                number: int = port["containerPort"]
                return number
    return None
