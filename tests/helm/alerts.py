"""The chart's alerts, rendered as Prometheus reads them. Needs ``helm``."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).resolve().parents[2] / "helm"
RELEASE, NAMESPACE = "relay", "models"

needs_helm = pytest.mark.skipif(shutil.which("helm") is None, reason="no helm")


def groups() -> dict[str, Any]:
    """What a file of rules holds."""
    command = [
        "helm", "template", RELEASE, str(CHART), "--namespace", NAMESPACE, "--kube-version", "1.32.0",
        "--api-versions", "monitoring.coreos.com/v1", "--show-only", "templates/shared/prometheusrule.yaml",
    ]  # fmt: skip
    rendered = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return {"groups": yaml.safe_load(rendered)["spec"]["groups"]}


def alerts() -> dict[str, dict[str, Any]]:
    """By name."""
    return {rule["alert"]: rule for group in groups()["groups"] for rule in group["rules"]}
