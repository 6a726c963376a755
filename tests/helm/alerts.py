"""The chart's alerts as Prometheus reads them. Needs ``helm``."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from .chart import MONITORING, objects

_UNITS_MS = {"s": 1000, "m": 60_000, "h": 3_600_000}


def groups(*arguments: str) -> dict[str, Any]:
    """The content of a rules file. ``arguments``: more of helm's."""
    return {"groups": objects(*MONITORING, *arguments)["PrometheusRule", "relay-kvrelay"]["spec"]["groups"]}


def alerts() -> dict[str, dict[str, Any]]:
    """The alerts by name."""
    return {rule["alert"]: rule for group in groups()["groups"] for rule in group["rules"]}


def sooner(all_of_them: Mapping[str, Any], times: int) -> dict[str, Any]:
    """A copy in which all durations (``for``, and ranges such as ``[5m]``) are divided by ``times``."""

    def shorter(duration: str) -> str:
        return f"{int(duration[:-1]) * _UNITS_MS[duration[-1]] // times}ms"

    changed = copy.deepcopy(dict(all_of_them))
    for rule in (rule for group in changed["groups"] for rule in group["rules"]):
        rule["expr"] = re.sub(r"\[(\d+[smh])\]", lambda found: f"[{shorter(found[1])}]", rule["expr"])
        if "for" in rule:
            rule["for"] = shorter(rule["for"])
    return changed
