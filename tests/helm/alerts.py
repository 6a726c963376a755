"""The chart's alerts, rendered as Prometheus reads them. Needs ``helm``."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).resolve().parents[2] / "helm"
RELEASE, NAMESPACE = "relay", "models"

_UNITS_MS = {"s": 1000, "m": 60_000, "h": 3_600_000}

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


def sooner(all_of_them: Mapping[str, Any], times: int) -> dict[str, Any]:
    """The same alerts, all of whose durations (``for``, and ranges such as ``[5m]``) are so many times shorter."""

    def shorter(duration: str) -> str:
        return f"{int(duration[:-1]) * _UNITS_MS[duration[-1]] // times}ms"

    changed = copy.deepcopy(dict(all_of_them))
    for rule in (rule for group in changed["groups"] for rule in group["rules"]):
        rule["expr"] = re.sub(r"\[(\d+[smh])\]", lambda found: f"[{shorter(found[1])}]", rule["expr"])
        if "for" in rule:
            rule["for"] = shorter(rule["for"])
    return changed
