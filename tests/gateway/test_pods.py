"""Pods to workers: pure."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.gateway.pods import worker_of, workers_of
from kvrelay.gateway.workers import FoundWorker
from kvrelay.wire.messages import Role


def pod(uid: str = "u", role: str | None = "decode", ip: str | None = "10.0.0.8", **changes: Any) -> dict[str, Any]:
    """A ready worker's pod, with ``changes``: ready, deleted, phase, ports."""
    metadata: dict[str, Any] = {"uid": uid, "name": uid, "resourceVersion": "1", "labels": {}}
    if role is not None:
        metadata["labels"]["kvrelay.dev/role"] = role
    if changes.get("deleted"):
        metadata["deletionTimestamp"] = "2026-11-21T00:00:00Z"
    ready = {"type": "Ready", "status": "True" if changes.get("ready", True) else "False"}
    status: dict[str, Any] = {
        "phase": changes.get("phase", "Running"),
        "conditions": [{"type": "Initialized", "status": "True"}, ready],
    }
    if ip is not None:
        status["podIP"] = ip
    ports = changes.get("ports", [{"name": "admin", "containerPort": 7280}, {"name": "control", "containerPort": 7200}])
    return {
        "metadata": metadata,
        "spec": {"containers": [{"name": "other"}, {"name": "worker", "ports": ports}]},
        "status": status,
    }


def test_a_ready_pod_is_a_worker() -> None:
    assert worker_of(pod()) == FoundWorker(Role.DECODE, "tcp://10.0.0.8:7200", "u", accepts=True)
    found = worker_of(pod(role="prefill", ip="fd00::8"))
    assert found == FoundWorker(Role.PREFILL, "tcp://[fd00::8]:7200", "u", accepts=True)


@pytest.mark.parametrize("changes", [{"ready": False}, {"deleted": True}])
def test_a_pod_that_starts_or_leaves_takes_nothing_new(changes: dict[str, Any]) -> None:
    found = worker_of(pod(**changes))
    assert found is not None
    assert not found.accepts


@pytest.mark.parametrize(
    "changes",
    [{"role": None}, {"role": "gateway"}, {"ip": None}, {"phase": "Failed"}, {"phase": "Succeeded"}, {"ports": []}],
)
def test_other_pods_are_no_workers(changes: dict[str, Any]) -> None:
    assert worker_of(pod(**changes)) is None


def test_a_pod_that_was_just_made_is_no_worker_yet() -> None:
    assert worker_of({"metadata": {"uid": "u", "labels": {"kvrelay.dev/role": "decode"}}, "spec": {}}) is None


@pytest.mark.parametrize("order", [1, -1])
def test_an_address_belongs_to_who_takes_requests_there(order: int) -> None:
    pods = [pod("old", deleted=True), pod("new"), pod("other", ip="10.0.0.9")][::order]
    assert {found.uid for found in workers_of(pods)} == {"new", "other"}
