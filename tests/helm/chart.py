"""The chart rendered without a cluster, for the tests in this folder. Needs ``helm``."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).resolve().parents[2] / "helm"
RELEASE, NAMESPACE = "relay", "models"
MONITORING = ("--api-versions", "monitoring.coreos.com/v1")
NODES = "decode.replicas=3,decode.tensorParallel=4,decode.nodesPerWorker=2,networkPolicy.enabled=true"
GROUPS = f"{NODES},decode.leaderWorkerSet=true"
needs_helm = pytest.mark.skipif(shutil.which("helm") is None, reason="no helm")
Manifest = dict[str, Any]


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["helm", *arguments], capture_output=True, text=True, check=False, timeout=60)


@functools.cache
def rendered(*arguments: str) -> str:
    ended = helm("template", RELEASE, str(CHART), "--namespace", NAMESPACE, "--kube-version", "1.32.0", *arguments)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def refusal(values: str) -> str:
    """helm's error for values that the chart must refuse."""
    ended = helm("template", RELEASE, str(CHART), "--set", values)
    assert ended.returncode != 0, f"{values} is taken"
    return ended.stderr


@functools.cache
def objects(*arguments: str) -> dict[tuple[str, str], Manifest]:
    """The rendered objects by kind and name, cached for all tests."""
    documents = [document for document in yaml.safe_load_all(rendered(*arguments)) if document]
    found = {(document["kind"], document["metadata"]["name"]): document for document in documents}
    assert len(found) == len(documents), "two objects of one kind and name"
    return found


def pod_of(found: dict[tuple[str, str], Manifest], component: str) -> Manifest:
    spec: Manifest = found["Deployment", f"relay-kvrelay-{component}"]["spec"]["template"]["spec"]
    return spec


def env_of(pod: Manifest) -> dict[str, str]:
    return {item["name"]: item.get("value", "") for item in pod["containers"][0]["env"]}
